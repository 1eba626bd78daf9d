"""Attention in parts: any cut of the keys, merged, is attention over all of them, with its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.ops.attention import attention, choose, chunked
from megatron.core.ops.attention.online_softmax import OnlineSoftmax
from megatron.core.ops.attention.partial import partial_attention, partial_attention_gradients
from megatron.core.ops.attention.registry import EVERYWHERE
from megatron.core.ops.attention.request import AttentionOptions, AttentionRequest
from tests.harness.sentences import check_sentence

ALL = slice(None)
DRAWING = ["chunked", "eager"]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of queries and a shorter last one."""
    monkeypatch.setattr(chunked, "_BLOCK", 2)


def make_qkv(*, sq: int = 10, sk: int = 10, g: int = 4, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(length, 3, heads, 8, dtype=dtype) for length, heads in ((sq, 4), (sk, g), (sk, g))]


@dataclass(frozen=True)
class Call:
    """Some queries and some keys of a whole, and whether the mask is causal between them."""

    rows: slice
    keys: slice
    causal: bool = False


CUTS: dict[str, tuple[dict[str, Any], bool, Sequence[Call]]] = {
    "all at once": ({}, False, [Call(ALL, ALL)]),
    "keys in two": ({}, False, [Call(ALL, slice(0, 3)), Call(ALL, slice(3, 10))]),
    "grouped, in three, last first": (
        {"g": 2},
        False,
        [Call(ALL, slice(7, 10)), Call(ALL, slice(0, 3)), Call(ALL, slice(3, 7))],
    ),
    "causal": ({}, True, [Call(ALL, ALL, causal=True)]),
    "causal by halves": (
        {"g": 1},
        True,
        [
            Call(slice(0, 5), slice(0, 5), causal=True),
            Call(slice(5, 10), slice(0, 5)),
            Call(slice(5, 10), slice(5, 10), causal=True),
        ],
    ),
    "cross": ({"sq": 4, "g": 2}, False, [Call(ALL, slice(0, 5)), Call(ALL, slice(5, 10))]),
}


def by_parts(
    inputs: list[Tensor], upstream: Tensor, calls: Sequence[Call], backend: str, **options: Any
) -> list[Tensor]:
    """Result and gradients from the parts, merged."""
    q, k, v = inputs
    merged = OnlineSoftmax.over_nothing(q, v)

    def settings(call: Call) -> AttentionOptions:
        return AttentionOptions(causal=call.causal, scale=0.3, **options)

    for call in calls:
        part = partial_attention(q[call.rows], k[call.keys], v[call.keys], settings(call), backend=backend)
        merged.of(call.rows, ALL).add(part)
    whole = merged.result(q.dtype)
    grads = [torch.zeros_like(x) for x in inputs]
    if "generator" in options:
        options["generator"].manual_seed(5)
    for call in calls:
        grad = partial_attention_gradients(
            upstream[call.rows],
            q[call.rows],
            k[call.keys],
            v[call.keys],
            type(whole)(whole.out[call.rows], whole.lse[call.rows]),
            settings(call),
            backend=backend,
        )
        for total, found, where in zip(grads, (grad.q, grad.k, grad.v), (call.rows, call.keys, call.keys)):
            total[where] += found
    return [whole.out, *grads]


@pytest.mark.parametrize("backend", EVERYWHERE)
@pytest.mark.parametrize("cut", CUTS)
def test_merged_parts_are_attention(cut: str, backend: str) -> None:
    """Every context-parallel rank computes its result and its gradients this way."""
    shape, causal, calls = CUTS[cut]
    inputs = [x.requires_grad_() for x in make_qkv(**shape)]
    q, k, v = inputs
    options = AttentionOptions(causal=causal, scale=0.3)
    expected = attention(q, k, v, options, backend="eager").view_as(q)
    upstream = torch.linspace(-1, 1, expected.numel(), dtype=expected.dtype).view_as(expected)
    wanted = [expected, *torch.autograd.grad(expected, inputs, upstream)]
    found = by_parts([x.detach() for x in inputs], upstream, calls, backend)
    for actual, wish in zip(found, wanted):
        torch.testing.assert_close(actual, wish, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("backend", ["chunked", "eager"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, (4, 2)])
def test_parts_know_how_far_their_keys_are(window: tuple[int, int] | None, causal: bool, backend: str) -> None:
    """A rank's queries are not at the end of another rank's keys: windows, ALiBi and soft caps would shift."""
    inputs = [x.requires_grad_() for x in make_qkv(g=2)]
    q, k, v = inputs
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.1], dtype=torch.float64)
    features: dict[str, Any] = {"window": window, "soft_cap": 0.8, "slopes": slopes, "scale": 0.3}
    expected = attention(q, k, v, AttentionOptions(causal=causal, **features), backend="eager").view_as(q)
    upstream = torch.linspace(-1, 1, expected.numel(), dtype=expected.dtype).view_as(expected)
    wanted = torch.autograd.grad(expected, inputs, upstream)
    q, k, v = (x.detach() for x in inputs)
    merged, cuts = OnlineSoftmax.over_nothing(q, v), (slice(0, 2), slice(2, 5), slice(5, 8), slice(8, 10))
    pairs = [(rows, keys) for rows in cuts for keys in cuts if not causal or keys.start <= rows.start]
    calls = [
        (rows, keys, AttentionOptions(causal=causal and rows == keys, offset=rows.start - keys.start, **features))
        for rows, keys in pairs
    ]
    for rows, keys, options in calls:
        merged.of(rows, ALL).add(partial_attention(q[rows], k[keys], v[keys], options, backend=backend))
    whole = merged.result(q.dtype)
    torch.testing.assert_close(whole.out, expected)
    found = [torch.zeros_like(x) for x in (q, k, v)]
    for rows, keys, options in calls:
        at = type(whole)(whole.out[rows], whole.lse[rows])
        grads = partial_attention_gradients(upstream[rows], q[rows], k[keys], v[keys], at, options, backend=backend)
        for total, grad, where in zip(found, (grads.q, grads.k, grads.v), (rows, keys, keys)):
            total[where] += grad
    for actual, wish in zip(found, wanted):
        torch.testing.assert_close(actual, wish)


@pytest.mark.parametrize("backend", ["chunked", "eager"])
def test_merged_parts_have_the_gradient_of_a_bias(backend: str) -> None:
    """Tables of positions would learn from a context-parallel rank's own keys alone, or from the wrong ones."""
    inputs = [x.requires_grad_() for x in make_qkv(sq=6, g=2)]
    bias = torch.randn(4, 6, 10, dtype=torch.float64, requires_grad=True)
    q, k, v = inputs
    options = AttentionOptions(causal=False, scale=0.3, bias=bias)
    expected = attention(q, k, v, options, backend="eager").view_as(q)
    upstream = torch.linspace(-1, 1, expected.numel(), dtype=expected.dtype).view_as(expected)
    (wanted,) = torch.autograd.grad(expected, [bias], upstream)
    q, k, v = (x.detach() for x in inputs)
    merged, parts = OnlineSoftmax.over_nothing(q, v), (slice(4, 10), slice(0, 4))
    asked = [AttentionOptions(causal=False, scale=0.3, bias=bias.detach()[:, :, keys]) for keys in parts]
    for keys, options in zip(parts, asked):
        merged.of(ALL, ALL).add(partial_attention(q, k[keys], v[keys], options, backend=backend))
    whole = merged.result(q.dtype)
    torch.testing.assert_close(whole.out, expected)
    for keys, options in zip(parts, asked):
        found = partial_attention_gradients(upstream, q, k[keys], v[keys], whole, options, backend=backend)
        torch.testing.assert_close(found.bias, wanted[:, :, keys])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", EVERYWHERE)
def test_parts_in_low_precision_stay_near_fp64(backend: str, dtype: torch.dtype) -> None:
    """Merging must not lose more than one kernel call over all keys does."""
    shape, _, calls = CUTS["causal by halves"]
    exact = make_qkv(**shape)
    upstream = torch.linspace(-1, 1, exact[0].numel(), dtype=torch.float64).view_as(exact[0])
    wanted = by_parts(exact, upstream, calls, "eager")
    found = by_parts([x.to(dtype) for x in exact], upstream.to(dtype), calls, backend)
    for actual, wish in zip(found, wanted):
        assert actual.dtype == dtype
        torch.testing.assert_close(
            actual.double(), wish, rtol=8 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps
        )


@pytest.mark.parametrize("backend", DRAWING)
def test_dropout_of_the_gradients_is_that_of_the_result(backend: str) -> None:
    """The backward pass draws the masks again; other masks would give the gradients of another function."""
    _, _, calls = CUTS["causal by halves"]
    q, k, v = make_qkv()
    upstream = torch.linspace(-1, 1, q.numel(), dtype=q.dtype).view_as(q)

    def parts(*inputs: Tensor) -> list[Tensor]:
        generator = torch.Generator().manual_seed(5)
        return by_parts(list(inputs), upstream, calls, backend, dropout=0.4, generator=generator)

    _, *grads = parts(q, k, v)
    for number, (x, grad) in enumerate(zip((q, k, v), grads)):
        direction = torch.randn_like(x)
        step = 1e-6
        others = [torch.zeros_like(y) for y in (q, k, v)]
        others[number] = step * direction
        above, *_ = parts(*(y + by for y, by in zip((q, k, v), others)))
        below, *_ = parts(*(y - by for y, by in zip((q, k, v), others)))
        slope = ((above - below) * upstream).sum() / (2 * step)
        torch.testing.assert_close(slope, (grad * direction).sum(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", ["chunked", "eager"])
def test_query_without_keys_gets_zeros(backend: str) -> None:
    """Padding may hide every key of a part, or of all parts: minus infinity must not become NaN."""
    q, k, v = make_qkv()
    padding = torch.ones(3, 10, dtype=torch.bool)
    padding[0, :5], padding[2] = False, False
    merged = OnlineSoftmax.over_nothing(q, v)
    for keys in (slice(0, 5), slice(5, 10)):
        options = AttentionOptions(causal=False, scale=0.3, attention_mask=padding[:, keys])
        merged.of(ALL, ALL).add(partial_attention(q, k[keys], v[keys], options, backend=backend))
    expected = attention(q, k, v, AttentionOptions(causal=False, scale=0.3, attention_mask=padding), backend="eager")
    torch.testing.assert_close(merged.out.flatten(2), expected)
    assert (merged.out[:, 2] == 0).all()
    whole = merged.result(q.dtype)
    options = AttentionOptions(causal=False, scale=0.3, attention_mask=padding)
    grads = partial_attention_gradients(torch.ones_like(q), q, k, v, whole, options, backend=backend)
    assert all(grad.isfinite().all() for grad in (grads.q, grads.k, grads.v))


def test_choice_says_what_refuses_a_part() -> None:
    """A GPU's flash kernel computes in 16 bits only; the report must say so instead of naming it."""

    def facts(device: str, dtype: torch.dtype, **changes: Any) -> str:
        q = torch.empty(8, 1, 2, 64, dtype=dtype, device=device)
        request = AttentionRequest.of(q, q, AttentionOptions(causal=True, scale=1.0, **changes), partial=True)
        return choose(request).describe()

    assert facts("cpu", torch.float64) == "sdpa"
    assert facts("meta", torch.bfloat16) == "sdpa"
    check_sentence(facts("meta", torch.float32), "float32")
    assert facts("cpu", torch.float32, attention_mask=torch.ones(1, 8, dtype=torch.bool)) == (
        "chunked (sdpa refused: its flash kernel has no padding mask)"
    )


@pytest.mark.parametrize("groups", [4, 1])
def test_kernels_of_accelerators_take_the_calls_made_to_them(groups: int) -> None:
    """They are other functions than the CPU's; tensors without numbers show at least that arguments and shapes fit."""
    q, k, v = (x.to("meta") for x in make_qkv(sk=6, g=groups, dtype=torch.bfloat16))
    options = AttentionOptions(causal=False, scale=0.3)
    part = partial_attention(q, k, v, options, backend="sdpa")
    assert (part.out.shape, part.lse.shape, part.lse.dtype) == (q.shape, q.shape[:3], torch.float32)
    grads = partial_attention_gradients(q, q, k, v, part, options, backend="sdpa")
    assert (grads.q.shape, grads.k.shape, grads.v.shape) == (q.shape, k.shape, v.shape)
