"""Backends of cached attention give the same numbers, so that the machine may choose."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron.core.ops.attention import AttentionOptions, cached_calls
from megatron.core.ops.attention.cached_calls import CACHED_BACKENDS, CachedCall, Grouped, cached_backend


@pytest.mark.parametrize("window", [None, (3, 0)])
@pytest.mark.parametrize("call", [CachedCall(6, 1, 0, 7), CachedCall(4, 3, 0, 7), CachedCall(0, 7, 0, 7)])
def test_backends_agree(call: CachedCall, window: tuple[int, int] | None) -> None:
    """One query, several behind cached keys, and a whole text, with and without a bias."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, rows, 8, dtype=torch.float64, generator=generator) for rows in (call.queries, 7, 7))
    options = AttentionOptions(causal=True, scale=0.3, window=window)
    bias = call.bias(options, None, q)
    found = [backend.attend(q, k, v, options, bias, causal=False) for backend in CACHED_BACKENDS.values()]
    if call.is_whole and window is None:
        found += [backend.attend(q, k, v, options, None, causal=True) for backend in CACHED_BACKENDS.values()]
    for each in found[1:]:
        torch.testing.assert_close(each, found[0], rtol=0, atol=1e-12)


def test_products_serve_what_the_kernel_does_not() -> None:
    keys, values = torch.zeros(1, 4, 8), torch.zeros(1, 4, 6)
    plain = AttentionOptions(causal=True, scale=1.0)
    capped = AttentionOptions(causal=True, scale=1.0, soft_cap=5.0)
    assert not isinstance(cached_backend(keys, keys, plain), Grouped)
    assert isinstance(cached_backend(keys, values, plain), Grouped)
    assert isinstance(cached_backend(keys, keys, capped), Grouped)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_without_instructions_for_them(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of bf16 numbers took up to 12 times as long as in fp32, and torch's kernel in fp16 three times: products
    are computed in fp32, sums included.
    """
    monkeypatch.setattr(cached_calls, "lacks_bf16", lambda: True)
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 16, 8, generator=generator).to(dtype) for _ in range(3))
    plain = AttentionOptions(causal=True, scale=0.3)
    options = replace(plain, soft_cap=5.0, sinks=torch.zeros(2, dtype=dtype))
    bias = CachedCall(0, 16, 0, 16).bias(plain, None, q)
    assert bias is not None
    wide = Grouped().attend(q.float(), k.float(), v.float(), options, bias.float(), causal=False)
    assert torch.equal(Grouped().attend(q, k, v, options, bias, causal=False), wide.to(dtype))
    if dtype == torch.float16:
        assert isinstance(cached_backend(k, v, plain), Grouped)
