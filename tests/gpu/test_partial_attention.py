"""Parts of attention on an accelerator: its flash kernel's results merge to attention over all keys."""

from __future__ import annotations

import pytest
import torch

from megatron.core.ops.attention.online_softmax import OnlineSoftmax
from megatron.core.ops.attention.partial import partial_attention, partial_attention_gradients
from megatron.core.ops.attention.request import AttentionOptions, PartialResult

EARLY, LATE, ALL = slice(0, 96), slice(96, 200), slice(None)


@pytest.mark.parametrize("groups", [8, 2, 1])
def test_flash_kernel_in_parts_equals_reference(groups: int) -> None:
    """Context parallelism merges what the kernel returns, and differentiates with the merged log-sum-exp."""
    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator()
    q, k, v = (torch.randn(200, 2, n, 64, device=device, dtype=torch.bfloat16) for n in (8, groups, groups))
    upstream = torch.randn_like(q)
    calls = ((EARLY, EARLY, True), (LATE, EARLY, False), (LATE, LATE, True))
    results = {}
    for backend, parts in (("sdpa", calls), ("eager", ((ALL, ALL, True),))):
        merged = OnlineSoftmax.over_nothing(q, v)
        for rows, keys, causal in parts:
            options = AttentionOptions(causal=causal, scale=0.125)
            merged.of(rows, ALL).add(partial_attention(q[rows], k[keys], v[keys], options, backend=backend))
        whole = merged.result(q.dtype)
        sums = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
        for rows, keys, causal in parts:
            options = AttentionOptions(causal=causal, scale=0.125)
            held = PartialResult(whole.out[rows], whole.lse[rows])
            grads = partial_attention_gradients(
                upstream[rows], q[rows], k[keys], v[keys], held, options, backend=backend
            )
            for total, found, where in zip(sums, (grads.q, grads.k, grads.v), (rows, keys, keys)):
                total[where] += found
        results[backend] = [whole.out.float(), whole.lse, *sums]
    for actual, expected in zip(results["sdpa"], results["eager"]):
        torch.testing.assert_close(actual, expected, rtol=2e-2, atol=3e-2)
