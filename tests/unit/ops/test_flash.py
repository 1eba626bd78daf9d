"""Flash kernels of other packages, by stubs with their signatures: values, gradients, and what each is asked."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.ops.attention import AttentionOptions, eager, flash, flash_attn
from megatron.core.ops.attention.flash import FlashBackend
from megatron.core.ops.attention.online_softmax import OnlineSoftmax
from megatron.core.ops.attention.request import PartialResult
from tests.attention_stubs import HALF, Kernels, Rule, backward_of_one, forward_of_one

RELEASES: dict[str, tuple[FlashBackend, float]] = {
    "flash_attn_2-2.6.3": (flash_attn.VERSION_2, math.inf),
    "flash_attn_2-2.8.3": (flash_attn.VERSION_2, math.inf),
    "flash_attn_3-2025": (flash_attn.VERSION_3, -math.inf),
    "flash_attn_3-2026": (flash_attn.VERSION_3, -math.inf),
}
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
SINKS = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64)
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 2], [0] * 9, [5, 6, 6, 6, 6, 6, 7, 7, 7]])
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "causal": ({}, {}),
    "bidirectional": ({"g": 2}, {"causal": False}),
    "one group": ({"g": 1}, {}),
    "cached keys": ({"sq": 4, "g": 2}, {}),
    "more queries than keys": ({"sq": 9, "sk": 4}, {}),
    "cross": ({"sq": 5}, {"causal": False}),
    "one query": ({"sq": 1}, {}),
    "narrow values": ({"dv": 5}, {}),
    "odd heads": ({"d": 13}, {}),
    "documents": ({"g": 2}, {"document_ids": DOCUMENTS}),
    "documents, bidirectional": ({}, {"causal": False, "document_ids": DOCUMENTS}),
    "window": ({"g": 2}, {"window": (3, 0)}),
    "window, bidirectional": ({}, {"causal": False, "window": (2, 1)}),
    "window, cached keys": ({"sq": 4}, {"window": (2, 0)}),
    "window of one": ({}, {"window": (0, 0)}),
    "soft cap": ({"g": 2}, {"soft_cap": 0.7}),
    "ALiBi": ({"g": 2}, {"slopes": SLOPES}),
    "ALiBi, cached keys": ({"sq": 4}, {"slopes": SLOPES}),
    "sinks": ({"g": 2}, {"sinks": SINKS}),
    "sinks, documents": ({}, {"sinks": SINKS, "document_ids": DOCUMENTS}),
    "everything": ({"g": 2}, {"window": (2, 0), "soft_cap": 0.7, "sinks": SINKS, "document_ids": DOCUMENTS}),
    "everything with ALiBi": ({"g": 1}, {"window": (2, 0), "soft_cap": 0.7, "slopes": SLOPES}),
}


@pytest.fixture(params=RELEASES)
def installed(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[FlashBackend, Kernels]]:
    """A backend, and the stub of a release of its package, which is installed for the length of a test."""
    backend, empty = RELEASES[request.param]
    kernels = Kernels(empty)
    for part in (backend.module.split(".")[0], backend.module):
        monkeypatch.setitem(sys.modules, part, kernels.module(part, request.param))
    flash.imported.cache_clear()
    yield backend, kernels
    flash.imported.cache_clear()


def make(
    *, sq: int = 9, sk: int = 9, g: int = 4, d: int = 8, dv: int | None = None, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((sq, 3, 4, d), (sk, 3, g, d), (sk, 3, g, dv or d))
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def results(backend: Any, inputs: list[Tensor], options: AttentionOptions) -> list[Tensor]:
    """Result and all gradients, in fp64."""
    sinks = options.sinks
    if sinks is not None:
        sinks = sinks.to(inputs[0].dtype).detach().requires_grad_()
        options = replace(options, sinks=sinks)
    out = backend.attend(*inputs, options)
    upstream = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out).to(out.dtype)
    wanted = inputs if sinks is None else [*inputs, sinks]
    return [each.double() for each in (out, *torch.autograd.grad(out, wanted, upstream))]


def asks(backend: FlashBackend, options: dict[str, Any]) -> None:
    """Skip a case that the package doesn't compute."""
    if "slopes" in options and "ALiBi" not in backend.capabilities.features:
        pytest.skip("it has no ALiBi")


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case: str, installed: tuple[FlashBackend, Kernels]) -> None:
    """Aligned top left, or with a window that is one too wide, training would learn from the wrong tokens."""
    backend, kernels = installed
    shape, options = CASES[case]
    asks(backend, options)
    kernels.dtypes = (torch.float64,)
    asked = AttentionOptions(**{"causal": True, "scale": 0.3} | options)
    inputs = make(**shape)
    for found, wanted in zip(results(backend, inputs, asked), results(eager, inputs, visible_only(asked, inputs))):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)


def visible_only(options: AttentionOptions, inputs: list[Tensor]) -> AttentionOptions:
    """For ``eager``, which gives zeros to a query that sees no key only where there is a padding mask."""
    if options.document_ids is not None or len(inputs[0]) <= len(inputs[1]):
        return options
    return replace(options, attention_mask=torch.ones(3, len(inputs[1]), dtype=torch.bool))


@pytest.mark.parametrize("case", ["narrow values", "more queries than keys", "everything", "everything with ALiBi"])
def test_in_16_bits(case: str, installed: tuple[FlashBackend, Kernels]) -> None:
    """The packages have kernels for 16 bits only, and the stub refuses other types."""
    dtype = torch.bfloat16
    backend, kernels = installed
    shape, options = CASES[case]
    asks(backend, options)
    asked, inputs = AttentionOptions(**{"causal": True, "scale": 0.3} | options), make(dtype=dtype, **shape)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    if asked.sinks is not None:
        asked = replace(asked, sinks=asked.sinks.to(dtype).double())
    size = 8 * torch.finfo(dtype).eps
    for found, wanted in zip(results(backend, inputs, asked), results(eager, exact, visible_only(asked, exact))):
        torch.testing.assert_close(found, wanted, rtol=size, atol=size)
    assert len(kernels.calls) == 2, "one call forward and one backward, with documents, too"


@pytest.mark.parametrize(
    ("window", "causal", "dtype"),
    [
        (None, True, torch.float64),
        ((4, 2), True, torch.bfloat16),
        ((4, 2), False, torch.float64),
        ((1, 0), True, torch.float64),
        ((1, 0), False, torch.float64),
    ],
)
def test_parts_merge_to_the_whole(
    window: tuple[int, int] | None, causal: bool, dtype: torch.dtype, installed: tuple[FlashBackend, Kernels]
) -> None:
    """A rank of a context-parallel ring has keys far before and far after its queries, or out of their sight."""
    backend, kernels = installed
    kernels.dtypes = (torch.float64, *HALF)
    inputs = make(g=2, dtype=dtype)
    features: dict[str, Any] = {"window": window, "soft_cap": 0.8, "scale": 0.3}
    exact = [x.detach().double().requires_grad_() for x in inputs]
    wanted = results(eager, exact, AttentionOptions(causal=causal, **features))
    q, k, v = (x.detach() for x in inputs)
    cuts = (slice(0, 2), slice(2, 5), slice(5, 8), slice(8, 9))
    calls = [
        (rows, keys, AttentionOptions(causal=causal, offset=rows.start - keys.start, **features))
        for rows, keys in itertools.product(cuts, cuts)
    ]
    merged = OnlineSoftmax.over_nothing(q, v)
    for rows, keys, options in calls:
        merged.of(rows, slice(None)).add(backend.attend_partly(q[rows], k[keys], v[keys], options))
    whole = merged.result(dtype)
    upstream = torch.linspace(-1, 1, q.numel(), dtype=torch.float64).view(9, 3, 32).view_as(q).to(dtype)
    sums = [torch.zeros(x.shape, dtype=torch.float64) for x in (q, k, v)]
    for rows, keys, options in calls:
        at = PartialResult(whole.out[rows], whole.lse[rows])
        found = backend.gradients_of_part(upstream[rows], q[rows], k[keys], v[keys], at, options)
        for total, each, place in zip(sums, (found.q, found.k, found.v), (rows, keys, keys)):
            total[place] += each
    size = 1e-9 if dtype == torch.float64 else 0.05
    for actual, wish in zip([whole.out.double().flatten(2), *sums], wanted):
        torch.testing.assert_close(actual, wish, rtol=size, atol=size)


def test_a_query_that_sees_no_key_weighs_nothing(installed: tuple[FlashBackend, Kernels]) -> None:
    """flash-attn 2 gives plus infinity for it, flash-attn 3 minus infinity: merged, plus infinity would be NaN."""
    backend, kernels = installed
    kernels.dtypes = (torch.float64,)
    q, k, v = (x.detach() for x in make())
    documents = AttentionOptions(causal=True, scale=0.3, offset=-3)
    part = backend.attend_partly(q, k, v, documents)
    assert (part.lse[:3] == -math.inf).all() and (part.out[:3] == 0).all() and part.lse[3:].isfinite().all()
    nothing = backend.attend_partly(q, k, v, replace(documents, offset=-9))
    assert (nothing.lse == -math.inf).all() and (nothing.out == 0).all()
    for whole, options in ((part, documents), (nothing, replace(documents, offset=-9))):
        found = backend.gradients_of_part(torch.ones_like(q), q, k, v, whole, options)
        assert all(each.isfinite().all() for each in (found.q, found.k, found.v))


def test_bounds_of_every_small_call() -> None:
    """What is left of a call, and its bounds, show exactly the pairs that the options show; no bound is below -1."""
    sizes, sides = range(1, 5), (None, 0, 1, 3)
    for queries, keys, before, after in itertools.product(sizes, sizes, sides, sides):
        for offset in range(-6, 7):
            wide = (99 if before is None else before, 99 if after is None else after)
            options = AttentionOptions(causal=False, scale=1.0, window=wide, offset=offset)
            wanted = {
                (i, j)
                for i, j in itertools.product(range(queries), range(keys))
                if i + offset - wide[0] <= j <= i + offset + wide[1]
            }
            band = flash._band(options, queries=queries, keys=keys)
            if band is None:
                assert not wanted
                continue
            assert min(band.left, band.right) >= 0
            rows, seen = range(queries)[band.rows], range(keys)[band.keys]
            shift = len(seen) - len(rows)
            found = {
                (i, j)
                for (a, i), (c, j) in itertools.product(enumerate(rows), enumerate(seen))
                if a + shift - band.left <= c <= a + shift + band.right
            }
            assert found == wanted, (queries, keys, wide, offset)


@pytest.mark.parametrize("is_asked", [False, True])
def test_gradients_are_deterministic_where_that_is_asked(
    is_asked: bool, installed: tuple[FlashBackend, Kernels], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --deterministic-mode gradients of keys would still be added in any order."""
    backend, kernels = installed
    kernels.dtypes = (torch.float64,)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: is_asked)
    results(backend, make(), AttentionOptions(causal=True, scale=0.3))
    assert [given["deterministic"] for name, given in kernels.calls if "backward" in name] == [is_asked]


@pytest.mark.parametrize("release", ["flash_attn_2-2.6.3", "flash_attn_2-2.8.3"])
def test_dropout_is_drawn_again_when_a_layer_is_recomputed(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel draws from torch's own generator, which is set to the layer's seed; else gradients would be those of
    another function.
    """
    kernels = Kernels(math.inf, dtypes=(torch.float64,))
    for part in ("flash_attn", "flash_attn.flash_attn_interface"):
        monkeypatch.setitem(sys.modules, part, kernels.module(part, release))
    flash.imported.cache_clear()
    q, k, v = make()
    before = torch.get_rng_state()

    def attend(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        options = AttentionOptions(causal=True, scale=0.3, dropout=0.4, generator=generator)
        return flash_attn.VERSION_2.attend(q, k, v, options)

    first, again, other = attend(3), attend(3), attend(4)
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before), "torch's own generator is as it was"
    upstream = torch.randn_like(first)
    (grad,) = torch.autograd.grad(first, [v], upstream)
    torch.testing.assert_close((grad * v).sum(), (upstream * first).sum())  # the result is linear in v
    flash.imported.cache_clear()


def test_the_stub_against_autograd() -> None:
    """Its two functions are written apart; one wrong formula in both would go unseen."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(n, h, 8, dtype=torch.float64, requires_grad=True) for n, h in ((5, 4), (7, 2), (7, 2)))
    rule = Rule(scale=0.3, left=3, right=1, soft_cap=0.9, slopes=SLOPES)
    kept = (torch.rand(4, 5, 7) > 0.3).double() / 0.7
    out, lse = forward_of_one(q, k, v, rule, kept, math.inf)
    upstream = torch.randn_like(out)
    wanted = torch.autograd.grad(out, [q, k, v], upstream)
    found = backward_of_one(upstream, q, k, v, out, lse, rule, kept)
    for actual, wish in zip(found, wanted):
        torch.testing.assert_close(actual, wish)
    torch.testing.assert_close(rule.scores(q, k)[0].softmax(-1).sum(-1), torch.ones(4, 5, dtype=torch.float64))
