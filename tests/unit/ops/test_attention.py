"""Attention: every backend against the reference, the reference against loops, and the choice between them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron.core.ops import matmul
from megatron.core.ops.attention import (
    AttentionOptions,
    AttentionRequest,
    LayerBackend,
    choose,
    chunked,
    registry,
    sdpa,
)
from megatron.core.ops.attention import attention as attention_with
from megatron.core.ops.attention.masks import alibi_slopes
from megatron.core.ops.attention.registry import EVERYWHERE
from megatron.errors import ConfigError
from tests.harness.sentences import check_sentence, expect_error

OTHERS = [name for name in EVERYWHERE if name != "eager"]


def make_qkv(
    *,
    sq: int = 9,
    sk: int | None = None,
    b: int = 3,
    n: int = 4,
    g: int = 4,
    d: int = 8,
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((sq, b, n, d), (sk or sq, b, g, d), (sk or sq, b, g, d))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def attention(q: Tensor, k: Tensor, v: Tensor, *, backend: str = "auto", **options: Any) -> Tensor:
    """With scores scaled as usual unless ``options`` have a scale."""
    return attention_with(q, k, v, AttentionOptions(**{"scale": q.shape[-1] ** -0.5} | options), backend=backend)


def by_loops(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    window: tuple[int, int] | None = None,
    soft_cap: float | None = None,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """One query at a time, in plain arithmetic."""
    sq, b, n, d = q.shape
    sk, _, g, _ = k.shape
    out = torch.zeros(sq, b, n, d, dtype=q.dtype)
    for i in range(sq):
        own = sk - sq + i
        before, after = window or (sk, sk)
        seen = [key for key in range(sk) if own - before <= key <= own + (0 if causal else after)]
        for j in range(b):
            for head in range(n):
                group = head // (n // g)
                scores = k[seen, j, group] @ q[i, j, head] / math.sqrt(d)
                if soft_cap is not None:
                    scores = soft_cap * (scores / soft_cap).tanh()
                if slopes is not None:
                    scores = scores - slopes[head] * torch.tensor([abs(own - key) for key in seen])
                sink = 0.0 if sinks is None else sinks[head].exp()
                weights = scores.exp() / (scores.exp().sum() + sink)
                out[i, j, head] = weights @ v[seen, j, group]
    return out.flatten(2)


SEGMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0, 0, 0, 0], [5, 6, 6, 6, 6, 6, 7, 7, 7]])
NOTHING = torch.tensor([[True] * 9, [False] * 9, [True] * 6 + [False] * 3])
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
SINKS = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64)
PADDING = torch.tensor([[True] * 9, [True] * 6 + [False] * 3, [False] * 2 + [True] * 7])

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "causal": ({}, {"causal": True}),
    "bidirectional": ({}, {"causal": False}),
    "grouped": ({"g": 2}, {"causal": True}),
    "one_group": ({"g": 1}, {"causal": True}),
    "own_scale": ({}, {"causal": True, "scale": 0.5}),
    "cross": ({"sq": 5}, {"causal": False}),
    "cached": ({"sq": 4, "sk": 9}, {"causal": True}),
    "one_query": ({"sq": 1, "sk": 9, "g": 2}, {"causal": True}),
    "documents": ({"g": 2}, {"causal": True, "document_ids": SEGMENTS}),
    "documents_bidirectional": ({}, {"causal": False, "document_ids": SEGMENTS}),
    "padding": ({"g": 2}, {"causal": False, "attention_mask": PADDING}),
    "padding_causal": ({}, {"causal": True, "attention_mask": PADDING}),
    "padding_alone": ({"sq": 5, "sk": 9, "g": 2}, {"causal": False, "attention_mask": NOTHING}),
    "padding_documents": ({}, {"causal": True, "attention_mask": PADDING, "document_ids": SEGMENTS}),
    "softmax_in_fp32": ({}, {"causal": True, "softmax_in_fp32": True}),
    "bias": ({}, {"causal": False, "bias": True}),
    "bias_causal_grouped": ({"g": 2}, {"causal": True, "bias": True}),
    "bias_padding_causal": ({"g": 2}, {"causal": True, "bias": True, "attention_mask": PADDING}),
    "bias_padding_alone": ({"sq": 5, "sk": 9, "g": 2}, {"causal": False, "bias": True, "attention_mask": NOTHING}),
    "window": ({"g": 2}, {"causal": True, "window": (2, 0)}),
    "window_without_rest": ({"sq": 8, "g": 1}, {"causal": True, "window": (4, 0)}),
    "window_of_half": ({}, {"causal": True, "window": (7, 0)}),
    "window_of_one": ({}, {"causal": True, "window": (0, 0)}),
    "window_longer_than_the_text": ({}, {"causal": True, "window": (50, 0)}),
    "window_cached": ({"sq": 4, "sk": 9}, {"causal": True, "window": (3, 0)}),
    "window_bidirectional": ({"g": 2}, {"causal": False, "window": (3, 1)}),
    "window_documents": ({}, {"causal": True, "window": (2, 0), "document_ids": SEGMENTS}),
    "window_padding": ({}, {"causal": False, "window": (2, 2), "attention_mask": PADDING}),
    "window_padding_causal": ({"g": 1}, {"causal": True, "window": (1, 0), "attention_mask": PADDING}),
    "window_bias": ({}, {"causal": True, "window": (2, 0), "bias": True}),
    "soft_cap": ({"g": 2}, {"causal": True, "soft_cap": 0.7}),
    "soft_cap_window_documents": (
        {},
        {"causal": True, "soft_cap": 0.7, "window": (2, 0), "document_ids": SEGMENTS},
    ),
    "soft_cap_bias_padding": ({}, {"causal": False, "soft_cap": 0.7, "bias": True, "attention_mask": PADDING}),
    "alibi": ({"g": 2}, {"causal": True, "slopes": SLOPES}),
    "alibi_bidirectional": ({}, {"causal": False, "slopes": SLOPES}),
    "alibi_cached": ({"sq": 4, "sk": 9}, {"causal": True, "slopes": SLOPES}),
    "alibi_documents": ({}, {"causal": True, "slopes": SLOPES, "document_ids": SEGMENTS}),
    "alibi_bias_padding": ({}, {"causal": True, "slopes": SLOPES, "bias": True, "attention_mask": PADDING}),
    "sinks": ({"g": 2}, {"causal": True, "sinks": True}),
    "sinks_cached": ({"sq": 4, "sk": 9}, {"causal": True, "sinks": True}),
    "sinks_documents": ({}, {"causal": True, "sinks": True, "document_ids": SEGMENTS}),
    "sinks_padding": ({}, {"causal": False, "sinks": True, "attention_mask": PADDING}),
    "everything": ({"g": 2}, {"causal": True, "sinks": True, "window": (3, 0), "soft_cap": 0.7, "slopes": SLOPES}),
    "bias_padding": ({"sq": 5, "sk": 9, "g": 2}, {"causal": False, "bias": True, "attention_mask": PADDING}),
}


def run(inputs: list[Tensor], **options: Any) -> list[Tensor]:
    """Result and the gradients; ``bias=True`` stands for one of any numbers, ``sinks=True`` for ``SINKS``."""
    if options.get("bias"):
        generator, (q, k) = torch.Generator().manual_seed(4), inputs[:2]
        bias = torch.randn(q.shape[2], q.shape[0], k.shape[0], dtype=torch.float64, generator=generator)
        options["bias"] = bias.to(q.dtype).requires_grad_()
        inputs = [*inputs, options["bias"]]
    if options.get("sinks"):
        options["sinks"] = SINKS.to(inputs[0].dtype).requires_grad_()
        inputs = [*inputs, options["sinks"]]
    out = attention(*inputs[:3], **options)
    upstream = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad(out, inputs, upstream)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", [{}, {"g": 2}, {"sq": 4, "sk": 9, "g": 1}])
def test_reference_is_attention(causal: bool, shape: dict[str, Any]) -> None:
    """Everything else is compared with the reference, so the reference is compared with arithmetic."""
    inputs = make_qkv(**shape)
    torch.testing.assert_close(attention(*inputs, causal=causal, backend="eager"), by_loops(*inputs, causal=causal))


@pytest.mark.parametrize(
    "options",
    [
        {"window": (2, 0)},
        {"causal": False, "window": (3, 1)},
        {"soft_cap": 0.7},
        {"slopes": SLOPES},
        {"causal": False, "slopes": SLOPES},
        {"sinks": SINKS},
        {"window": (3, 0), "soft_cap": 0.7, "slopes": SLOPES, "sinks": SINKS},
    ],
)
@pytest.mark.parametrize("shape", [{}, {"g": 2}, {"sq": 4, "sk": 9, "g": 1}])
def test_reference_computes_each_feature(options: dict[str, Any], shape: dict[str, Any]) -> None:
    """A window one key too wide, or a cap after the bias, is another model."""
    inputs = make_qkv(**shape)
    found = attention(*inputs, **{"causal": True} | options, backend="eager")
    torch.testing.assert_close(found, by_loops(*inputs, **{"causal": True} | options))


def test_bias_is_added_to_scaled_scores() -> None:
    """Scaled with the scores, positions would count less the wider heads are."""
    q, k, v = make_qkv(sq=3, sk=5, b=1, n=2, g=2)
    bias = torch.randn(2, 3, 5, dtype=torch.float64)
    weights = [(k[:, 0, head] @ q[:, 0, head].T * 0.5 + bias[head].T).softmax(0) for head in range(2)]
    expected = torch.cat([weights[head].T @ v[:, 0, head] for head in range(2)], dim=1).unsqueeze(1)
    found = attention(q, k, v, causal=False, scale=0.5, bias=bias, backend="eager")
    torch.testing.assert_close(found, expected)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of queries and a shorter last one."""
    monkeypatch.setattr(chunked, "_BLOCK", 2)
    monkeypatch.setattr(sdpa, "_SHORTEST_WINDOW", 1)
    monkeypatch.setattr(sdpa, "_FEWEST_QUERIES", 2)


def skip_refused(backend: str, case: str) -> None:
    """Skip a case that the backend refuses."""
    options = CASES[case][1]
    known = ("attention_mask", "document_ids", "bias", "soft_cap", "slopes", "sinks")
    shape, masks = CASES[case][0], {"window": options.get("window"), "causal": options["causal"]}
    lengths = {"query_length": shape.get("sq", 9), "key_length": shape.get("sk", 9)}
    facts = request(**{name: name in options for name in known}, **masks, **lengths)
    reason = EVERYWHERE[backend].supports(facts)
    if reason is not None:
        pytest.skip(f"{backend} refuses {case}: {reason}")


@pytest.mark.parametrize("how", ["masked", "causal first", "blocks"])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 7, 8])
def test_windows_of_every_length(window: int, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole blocks, and a rest of any length; with masks, and in blocks as on a GPU."""
    monkeypatch.setattr(sdpa, "_KERNEL_BLOCK", 0 if how == "causal first" else 512)
    if how == "blocks":
        monkeypatch.setattr(sdpa, "_LONGEST_MASKED_WINDOW", 0)
        monkeypatch.setattr(sdpa, "_LONGEST_MASKED", 0)
    inputs, options = make_qkv(g=2), {"causal": True, "window": (window - 1, 0)}
    for actual, expected in zip(run(inputs, backend="sdpa", **options), run(inputs, backend="eager", **options)):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("backend", OTHERS)
@pytest.mark.parametrize("case", CASES)
def test_backend_equals_reference(backend: str, case: str) -> None:
    """A speed choice must not change results, forward or backward."""
    skip_refused(backend, case)
    shape, options = CASES[case]
    inputs = make_qkv(**shape)
    for actual, expected in zip(run(inputs, backend=backend, **options), run(inputs, backend="eager", **options)):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("backend", EVERYWHERE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "case", ["causal", "documents", "padding_causal", "bias_padding", "sinks", "window", "everything"]
)
def test_backend_in_low_precision_stays_near_fp64(backend: str, dtype: torch.dtype, case: str) -> None:
    """Kernels differ by type; none may lose more than rounding."""
    skip_refused(backend, case)
    shape, options = CASES[case]
    exact = make_qkv(**shape)
    rounded = [x.detach().to(dtype).requires_grad_() for x in exact]
    for actual, expected in zip(run(rounded, backend=backend, **options), run(exact, backend="eager", **options)):
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("backend", EVERYWHERE)
def test_documents_equal_separate_calls(backend: str) -> None:
    """Packing documents into a sample must give each the result it would have alone."""
    inputs = make_qkv()
    packed = attention(*inputs, causal=True, document_ids=SEGMENTS, backend=backend)
    for sample, row in enumerate(SEGMENTS.tolist()):
        for document in sorted(set(row)):
            at = [i for i, number in enumerate(row) if number == document]
            alone = attention(*(x[at][:, sample : sample + 1] for x in inputs), causal=True, backend=backend)
            torch.testing.assert_close(packed[at][:, sample : sample + 1], alone, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("backend", EVERYWHERE)
def test_query_without_keys_gives_zeros_and_no_nan(backend: str) -> None:
    """Left padding leaves early queries with nothing to see; a NaN there would poison every gradient."""
    skip_refused(backend, "padding_causal")
    results = run(make_qkv(), causal=True, attention_mask=PADDING, backend=backend)
    assert all(result.isfinite().all() for result in results)
    assert (results[0][:2, 2] == 0).all() and (results[0][2:, 2] != 0).any()


@pytest.mark.parametrize("backend", EVERYWHERE)
def test_strided_slices_of_a_fused_projection(backend: str) -> None:
    """Layers pass views into one QKV tensor; a backend must not depend on contiguous inputs."""
    fused = torch.randn(9, 3, 4, 3, 8, dtype=torch.float64)
    views = [fused[:, :, :, i] for i in range(3)]
    actual = attention(*views, causal=True, backend=backend)
    copies = [view.contiguous() for view in views]
    torch.testing.assert_close(actual, attention(*copies, causal=True, backend="eager"), rtol=1e-9, atol=1e-11)
    assert actual.is_contiguous()


@pytest.mark.parametrize("backend", ["eager", "chunked"])
def test_dropout_is_replayed_from_the_generator(backend: str) -> None:
    """Recomputation seeds the generator again and must get the same result."""
    inputs = make_qkv()
    options: dict[str, Any] = {"causal": True, "dropout": 0.5, "backend": backend}
    results = [attention(*inputs, **options, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@pytest.mark.parametrize("backend", ["eager", "chunked"])
@pytest.mark.parametrize("shape", [{}, {"g": 2}, {"sinks": True, "window": (2, 0), "soft_cap": 0.5}])
def test_dropout_gradient_uses_the_mask_of_the_forward_pass(backend: str, shape: dict[str, Any]) -> None:
    """Whether the mask is kept or drawn again, it must be the same one."""
    shape = dict(shape)

    options = {name: shape.pop(name) for name in ("window", "soft_cap") if name in shape}
    sinks = [SINKS.clone().requires_grad_()] if shape.pop("sinks", False) else []

    def call(*inputs: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(3)
        q, k, v, *rest = inputs
        drop: dict[str, Any] = {"dropout": 0.3, "generator": generator, "sinks": rest[0] if rest else None}
        out = attention(q, k, v, causal=True, backend=backend, **drop, **options)
        generator.manual_seed(99)  # what later layers do before the backward pass
        return out

    assert torch.autograd.gradcheck(call, [*make_qkv(sq=6, b=1, d=2, **shape), *sinks])


@pytest.mark.parametrize("backend", ["eager", "chunked"])
def test_dropout_keeps_the_mean(backend: str) -> None:
    """Dropped probabilities are made up for by the others."""
    q, k, _ = make_qkv(sq=64, b=8)
    ones = torch.ones(64, 8, 4, 1, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    out = attention(q, k, ones, causal=False, dropout=0.25, generator=generator, backend=backend)
    assert out.mean().item() == pytest.approx(1.0, abs=0.02) and out.std() > 0.01


def request(**changes: Any) -> AttentionRequest:
    lengths = {"query_length": 8, "key_length": 8, "head_width": 8}
    facts: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32, "causal": True, **lengths}
    return AttentionRequest(**(facts | changes))


def test_auto_takes_the_first_that_supports_the_request_and_says_why() -> None:
    """The start-up report tells which kernel runs, and why not a faster one."""
    assert choose(request()).describe() == "sdpa"
    choice = choose(request(dropout=0.1, attention_mask=True, document_ids=True))
    assert choice.name == "eager"
    check_sentence(choice.describe(), "0.1")


def test_bf16_on_a_cpu_prefers_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch's kernel is the slow one: not where it computes in fp32."""
    monkeypatch.setattr(matmul, "_is_slow_in_bf16", lambda: True)
    assert choose(request(dtype=torch.bfloat16)).name == "sdpa"
    monkeypatch.setattr(matmul, "_is_slow_in_bf16", lambda: False)
    assert choose(request(dtype=torch.bfloat16)).name == "chunked"
    assert choose(request(dtype=torch.bfloat16, softmax_in_fp32=True)).name == "sdpa"
    assert choose(request(dtype=torch.bfloat16, device=torch.device("meta"))).name == "sdpa"


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({}, {"causal": True}),
        ({"g": 2}, {"causal": True, "document_ids": SEGMENTS}),
        ({}, {"causal": False}),
        ({}, {"causal": True, "window": (2, 0)}),
        ({}, {"causal": False, "attention_mask": NOTHING}),
        ({"sk": 12}, {"causal": True}),
    ],
    ids=["causal", "documents", "full", "window", "padding", "cached keys"],
)
def test_the_kernel_computes_bf16_in_fp32_where_that_is_faster(
    shape: dict[str, int], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounded once: four times as near to the exact result as bf16 sums. Kept is what came, in bf16."""
    monkeypatch.setattr(matmul, "_is_slow_in_bf16", lambda: True)
    inputs = [x.detach().requires_grad_() for x in make_qkv(dtype=torch.bfloat16, **shape)]
    kept: set[torch.dtype] = set()

    def keep(x: Tensor) -> Tensor:
        kept.update({x.dtype} if x.dim() == 4 else ())
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = attention(*inputs, backend="sdpa", **options)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = attention(*exact, backend="eager", **options)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    found = [out, *torch.autograd.grad(out, inputs, upstream)]
    for mine, theirs in zip(found, [expected, *torch.autograd.grad(expected, exact, upstream.double())]):
        assert mine.dtype == torch.bfloat16
        torch.testing.assert_close(mine.double(), theirs, rtol=0.01, atol=0.01)
    if "attention_mask" not in options and "sk" not in shape:  # torch's own function keeps copies
        assert kept == {torch.bfloat16}


def test_explicit_choice_is_honoured_or_refused_with_the_reason() -> None:
    """Never silently another kernel than the one asked for."""
    assert choose(request(), "eager").name == "eager"
    with expect_error(ConfigError, "--attention-backend sdpa", "0.1"):
        choose(request(dropout=0.1), "sdpa")
    with expect_error(ConfigError, "--attention-backend fast", "flash_attn_3"):
        choose(request(), "fast")


def test_slopes_of_heads_that_are_no_power_of_two() -> None:
    """BLOOM's rule (arXiv:2108.12409): those of the power of two below, then every second one of the power above."""
    powers_of_eight, powers_of_sixteen = range(1, 9), (0.5, 1.5, 2.5, 3.5)
    assert alibi_slopes(8).tolist() == [2.0**-each for each in powers_of_eight]
    assert alibi_slopes(12).tolist() == [2.0**-each for each in (*powers_of_eight, *powers_of_sixteen)]


def test_a_layer_chooses_once_for_each_kind_of_call() -> None:
    """Start-up knows which backend serves a layer; the request was made and compared again at every call."""
    backend, q = LayerBackend("auto"), torch.randn(4, 2, 2, 8, requires_grad=True)
    options = AttentionOptions(causal=True, scale=1.0)
    with mock.patch.object(registry, "choose", wraps=registry.choose) as chosen:
        for _ in range(3):
            whole = attention_with(q, q, q, options, backend=backend)
        assert chosen.call_count == 1
        shorter = attention_with(q[:2], q[:2], q[:2], options, backend=backend)
        padded = dataclasses.replace(options, attention_mask=torch.ones(2, 4, dtype=torch.bool))
        masked = attention_with(q, q, q, padded, backend=backend)
        with torch.no_grad():
            attention_with(q.detach(), q.detach(), q.detach(), options, backend=backend)
        assert chosen.call_count == 4
        torch.use_deterministic_algorithms(True)  # a kernel that sums in any order was kept
        try:
            attention_with(q, q, q, options, backend=backend)
        finally:
            torch.use_deterministic_algorithms(False)
        assert chosen.call_count == 5
    torch.testing.assert_close(shorter, whole[:2])
    torch.testing.assert_close(masked, whole)
    with expect_error(ConfigError, "--attention-backend"):
        attention_with(q, q, q, options, backend=LayerBackend("fast"))


@pytest.mark.parametrize("window", [None, (3, 0)])
@pytest.mark.parametrize("has_documents", [False, True])
def test_keys_ahead_are_seen(window: tuple[int, int] | None, has_documents: bool) -> None:
    """An image whose places see those before them alone is read as another one; a window still hides what is far."""
    q, k, v = make_qkv()
    ahead = torch.tensor([[0, 2, 1, 0, 0, 3, 2, 1, 0], [8, 7, 6, 5, 4, 3, 2, 1, 0], [0] * 9])
    documents = torch.tensor([[0] * 4 + [1] * 5, [0] * 2 + [1] * 7, [0] * 9]) if has_documents else None
    place, key = torch.arange(9)[:, None], torch.arange(9)
    seen = key <= place + ahead[:, :, None]
    seen &= key >= place - (9 if window is None else window[0])
    if documents is not None:
        seen &= documents[:, :, None] == documents[:, None]
    scores = torch.einsum("sbnd,tbnd->bnst", q, k) * q.shape[-1] ** -0.5
    wanted = torch.einsum("bnst,tbnd->sbnd", scores.masked_fill(~seen[:, None], -math.inf).softmax(-1), v).flatten(2)
    for backend in ("auto", "eager", "sdpa"):
        found = attention(q, k, v, causal=True, ahead=ahead, window=window, document_ids=documents, backend=backend)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    with expect_error(ConfigError, "keys ahead of a query"):
        attention(q, k, v, causal=True, ahead=ahead, backend="chunked")
