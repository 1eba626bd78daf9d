"""Every attention kernel that is installed, against explicit scores in fp64: the first thing to run on a new GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.device import capability
from megatron.core.ops.attention import AttentionOptions, AttentionRequest, eager
from megatron.core.ops.attention.registry import KERNELS

DOCUMENTS = torch.tensor([[0] * 70 + [1] * 129 + [2], [4] * 200]).int()
CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "causal": ({}, {}),
    "bidirectional": ({"g": 2}, {"causal": False}),
    "cached keys": ({"sq": 77, "g": 2}, {}),
    "window": ({}, {"window": (63, 0)}),
    "soft cap": ({}, {"soft_cap": 5.0}),
    "ALiBi": ({}, {"slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])}),
    "sinks": ({"g": 1}, {"sinks": torch.tensor([0.3, -1.0, 2.0, 0.0])}),
    "documents": ({"g": 2}, {"document_ids": DOCUMENTS}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", KERNELS)
def test_kernel_equals_explicit_scores(name: str, case: str) -> None:
    """What stubs show of signatures and conventions, shown of the real package."""
    device, kernel, (shape, features) = torch.device("cuda", 0), KERNELS[name], CASES[case]
    if missing := kernel.missing():
        pytest.skip(missing)
    torch.manual_seed(0)
    heads = ((shape.get("sq", 200), 4), (200, shape.get("g", 4)), (200, shape.get("g", 4)))
    inputs = [torch.randn(length, 2, n, 64, device=device, dtype=torch.bfloat16) for length, n in heads]
    moved = {key: x.to(device) if isinstance(x, Tensor) else x for key, x in features.items()}
    facts: dict[str, Any] = {"causal": True, "scale": 0.125} | moved
    options = AttentionOptions(**facts)
    request = AttentionRequest.of(inputs[0], inputs[1], options)
    assert request.capability == capability(device)
    if reason := kernel.supports(request):
        pytest.skip(reason)
    if options.sinks is not None and not kernel.takes_sinks:
        pytest.skip("its sinks are made of partial calls")
    results = []
    for backend, dtype in ((kernel, torch.bfloat16), (eager, torch.float64)):
        q, k, v = (x.to(dtype).requires_grad_() for x in inputs)
        out = backend.attend(q, k, v, options)
        upstream = torch.linspace(-1, 1, out.numel(), device=device, dtype=torch.float64).view_as(out).to(dtype)
        results.append([each.double() for each in (out, *torch.autograd.grad(out, [q, k, v], upstream))])
    for found, wanted in zip(*results):
        torch.testing.assert_close(found, wanted, rtol=0.03, atol=0.03)
