"""Attention kernels of torch and Transformer Engine by stubs; which kernel serves which call on which GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from megatron.core.ops import matmul
from megatron.core.ops.attention import AttentionOptions, AttentionRequest, choose, eager, flash, sdpa
from megatron.core.ops.attention import transformer_engine as engine
from megatron.core.ops.attention.online_softmax import OnlineSoftmax
from megatron.core.ops.attention.registry import BACKENDS, KERNELS, preferred
from megatron.core.ops.attention.request import PartialResult
from megatron.errors import ConfigError
from tests.attention_stubs import TransformerEngine, torch_kernels
from tests.harness.sentences import check_sentence, expect_error

DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 2], [5, 6, 6, 6, 6, 6, 7, 7, 7]])
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
SINKS = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64)


def make(*, sq: int = 9, g: int = 2, d: int = 8, dv: int | None = None) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((sq, 2, 4, d), (9, 2, g, d), (9, 2, g, dv or d))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def results(backend: Any, inputs: list[Tensor], options: AttentionOptions) -> list[Tensor]:
    out = backend.attend(*inputs, options)
    upstream = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
    wanted = inputs if options.sinks is None else [*inputs, options.sinks]
    return [out, *torch.autograd.grad(out, wanted, upstream)]


def assert_agrees(backend: Any, shape: dict[str, Any], options: dict[str, Any]) -> None:
    """With ``eager``, in value and gradients."""
    asked = AttentionOptions(**{"causal": True, "scale": 0.3} | options)
    inputs = make(**shape)
    for found, wanted in zip(results(backend, inputs, asked), results(eager, inputs, asked)):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)


@pytest.fixture(scope="module")
def torch_stubs() -> Iterator[None]:
    """Torch's operators for GPUs, on a CPU."""
    library = torch.library.Library("aten", "IMPL", "CPU")  # type: ignore[no-untyped-call]
    torch_kernels(library)
    yield
    library._destroy()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({"g": 1}, {}),
        ({"sq": 4}, {}),
        ({"dv": 5}, {"causal": False}),
        ({}, {"window": (3, 0), "document_ids": DOCUMENTS}),
        ({}, {"sinks": SINKS.requires_grad_(), "document_ids": DOCUMENTS}),
        ({"d": 13}, {"causal": False, "window": (2, 1)}),
    ],
)
def test_torchs_flash_kernel(shape: dict[str, Any], options: dict[str, Any], torch_stubs: None) -> None:
    """Its operators are called with the schema of the installed torch."""
    assert_agrees(BACKENDS["varlen"], shape, options)


@pytest.mark.parametrize("name", ["varlen", "cudnn"])
def test_parts_of_torchs_kernels_merge(name: str, torch_stubs: None) -> None:
    """In a context-parallel ring, a part is causal or whole; cuDNN's log-sum-exp has a dim of one at its end."""
    inputs, backend = make(), BACKENDS[name]
    wanted = results(eager, inputs, AttentionOptions(causal=True, scale=0.3))
    q, k, v = (x.detach() for x in inputs)
    first, early, late = slice(0, 1), slice(1, 4), slice(4, 9)
    calls = [(rows, rows, True) for rows in (first, early, late)]
    calls += [(early, first, False), (late, first, False), (late, early, False)]
    merged = OnlineSoftmax.over_nothing(q, v)
    for rows, keys, causal in calls:
        part = backend.attend_partly(q[rows], k[keys], v[keys], AttentionOptions(causal=causal, scale=0.3))
        merged.of(rows, slice(None)).add(part)
    whole = merged.result(q.dtype)
    upstream = torch.linspace(-1, 1, q.numel(), dtype=torch.float64).view_as(q)
    sums = [torch.zeros_like(x) for x in (q, k, v)]
    for rows, keys, causal in calls:
        held = PartialResult(whole.out[rows], whole.lse[rows])
        options = AttentionOptions(causal=causal, scale=0.3)
        found = backend.gradients_of_part(upstream[rows], q[rows], k[keys], v[keys], held, options)
        for total, each, at in zip(sums, (found.q, found.k, found.v), (rows, keys, keys)):
            total[at] += each
    for actual, wish in zip([whole.out.flatten(2), *sums], wanted):
        torch.testing.assert_close(actual, wish)


@pytest.mark.parametrize("name", ["cudnn", "varlen"])
def test_torchs_operators_take_the_calls_made_to_them(name: str) -> None:
    """With the installed torch's schemas; tensors without numbers show at least that arguments and shapes fit."""
    q, k, v = (x.detach().to("meta", torch.bfloat16) for x in make())
    options = AttentionOptions(causal=True, scale=0.3)
    part = BACKENDS[name].attend_partly(q, k, v, options)
    assert (part.out.shape, part.lse.shape, part.lse.dtype) == (q.shape, q.shape[:3], torch.float32)
    found = BACKENDS[name].gradients_of_part(q, q, k, v, part, options)
    assert (found.q.shape, found.k.shape, found.v.shape) == (q.shape, k.shape, v.shape)


def test_torch_is_told_which_kernel_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Left to itself it takes the one that keeps all scores wherever another refuses: memory would explode."""
    asked: list[Any] = []

    def recorded(kernels: list[SDPBackend], set_priority: bool) -> Any:
        asked.append([kernel.name for kernel in kernels])
        assert set_priority
        return nullcontext()

    monkeypatch.setattr(sdpa, "sdpa_kernel", recorded)
    groups: list[int] = []
    monkeypatch.setattr(sdpa, "_attend", lambda q, k, v, options: groups.append(k.shape[2]))
    options = AttentionOptions(causal=True, scale=0.3)
    padded = AttentionOptions(causal=False, scale=0.3, attention_mask=torch.ones(2, 9, dtype=torch.bool))

    def attend(name: str, inputs: list[Tensor], options: AttentionOptions) -> None:
        q, k, v = inputs
        BACKENDS[name].attend(q, k, v, options)

    half = [x.detach().to("meta", torch.bfloat16) for x in make()]
    attend("cudnn", half, options)
    attend("efficient", half, options)
    attend("sdpa", half, options)
    attend("sdpa", half, padded)
    attend("sdpa", [x.float() for x in half], options)
    attend("sdpa", [x.double() for x in half], options)
    both = ["FLASH_ATTENTION", "EFFICIENT_ATTENTION"]
    of_cudnn = ["CUDNN_ATTENTION", "FLASH_ATTENTION"]  # the second for documents of one token
    assert asked == [of_cudnn, ["EFFICIENT_ATTENTION"], both, both, ["EFFICIENT_ATTENTION"]]
    assert groups == [2, 4, 2, 4, 4, 2], "the memory-efficient kernel has no groups: their keys are repeated"


@pytest.fixture
def engine_stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[TransformerEngine]:
    """Transformer Engine is installed for the length of a test."""
    stub = TransformerEngine()
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, stub.module(name, "transformer_engine-2"))
    flash.imported.cache_clear()
    engine._module.cache_clear()
    yield stub
    flash.imported.cache_clear()
    engine._module.cache_clear()


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({}, {}),
        ({"sq": 4}, {}),
        ({"sq": 5, "g": 4, "dv": 5}, {"causal": False}),
        ({"g": 1}, {"window": (3, 0), "slopes": SLOPES}),
        ({}, {"causal": False, "window": (2, 1)}),
        ({}, {"document_ids": DOCUMENTS, "window": (2, 0)}),
        ({}, {"causal": False, "document_ids": DOCUMENTS}),
    ],
)
def test_transformer_engine(shape: dict[str, Any], options: dict[str, Any], engine_stub: TransformerEngine) -> None:
    """Its causal mask is aligned top left unless its name says otherwise; layers share a module."""
    assert_agrees(engine.BACKEND, shape, options)
    assert_agrees(engine.BACKEND, shape, options)
    assert len(engine_stub.made) == 1 and len(engine_stub.calls) == 2


def test_transformer_engine_draws_the_layers_dropout(engine_stub: TransformerEngine) -> None:
    """A recomputed layer must draw the same."""
    q, k, v = make()

    def attend(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return engine.BACKEND.attend(
            q, k, v, AttentionOptions(causal=True, scale=0.3, dropout=0.4, generator=generator)
        )

    first, again, other = attend(3), attend(3), attend(4)
    assert torch.equal(first, again) and not torch.equal(first, other)


def request(**changes: Any) -> AttentionRequest:
    lengths = {"query_length": 64, "key_length": 64, "head_width": 64}
    facts: dict[str, Any] = {"device": torch.device("meta"), "dtype": torch.bfloat16, "causal": True, **lengths}
    return AttentionRequest(**(facts | {"capability": (9, 0)} | changes))


# What is asked, and the kernels that refuse it, each in its own words.
REFUSED: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "nothing special": ({}, {}),
    "dropout": (
        {"dropout": 0.1},
        dict.fromkeys(("flash_attn_3", "varlen", "cudnn", "efficient"), "has no dropout"),
    ),
    "window": ({"window": (31, 0)}, dict.fromkeys(("cudnn", "efficient"), "has no windows")),
    "soft cap": (
        {"soft_cap": True},
        dict.fromkeys(("varlen", "cudnn", "efficient", "transformer_engine"), "has no soft caps"),
    ),
    "soft cap and dropout": (
        {"soft_cap": True, "dropout": 0.1},
        {"flash_attn_3": "has no dropout", "flash_attn_2": "has no soft caps together with dropout"}
        | dict.fromkeys(("varlen", "cudnn", "efficient"), "has no dropout")
        | {"transformer_engine": "has no soft caps"},
    ),
    "ALiBi": ({"slopes": True}, dict.fromkeys(("flash_attn_3", "varlen", "cudnn", "efficient"), "has no ALiBi")),
    "sinks": ({"sinks": True}, dict.fromkeys(("efficient", "transformer_engine"), "has no sinks")),
    "documents": ({"document_ids": True}, {}),
    "padding": (
        {"attention_mask": True},
        dict.fromkeys(
            ("flash_attn_3", "flash_attn_2", "varlen", "cudnn", "transformer_engine"), "has no padding masks"
        ),
    ),
    "bias": ({"bias": True}, dict.fromkeys(KERNELS, "has no biases")),
    "cached keys": ({"query_length": 8}, dict.fromkeys(("cudnn", "efficient"), "has no cached keys")),
    "a ring": ({"partial": True}, dict.fromkeys(("efficient", "transformer_engine"), "has no parts of the keys")),
    "a ring with dropout": (
        {"partial": True, "dropout": 0.1},
        dict.fromkeys(("flash_attn_3", "varlen", "cudnn", "efficient"), "has no dropout")
        | {"flash_attn_2": "has no dropout together with parts of the keys"}
        | {"transformer_engine": "has no parts of the keys"},
    ),
    "a ring with ALiBi": (
        {"partial": True, "slopes": True},
        dict.fromkeys(("flash_attn_3", "varlen", "cudnn", "efficient"), "has no ALiBi")
        | {"flash_attn_2": "has no ALiBi together with parts of the keys"}
        | {"transformer_engine": "has no parts of the keys"},
    ),
    "sinks and ALiBi": (
        {"sinks": True, "slopes": True},
        dict.fromkeys(("flash_attn_3", "varlen", "cudnn", "efficient"), "has no ALiBi")
        | {"flash_attn_2": "has no ALiBi together with sinks", "transformer_engine": "has no sinks"},
    ),
    "determinism": (
        {"deterministic": True},
        dict.fromkeys(("flash_attn_3", "cudnn", "efficient"), "has no determinism"),
    ),
    "determinism without gradients": ({"deterministic": True, "needs_grad": False}, {}),
    "fp32": (
        {"dtype": torch.float32},
        dict.fromkeys(
            ("flash_attn_3", "flash_attn_2", "varlen", "cudnn", "transformer_engine"), "does not support float32"
        ),
    ),
    "wide heads": ({"head_width": 192}, {"cudnn": "cuDNN's kernel has no heads of 192, only up to 128"}),
    "odd heads": (
        {"head_width": 63},
        dict.fromkeys(("cudnn", "efficient"), "has no heads of 63, only multiples of 8"),
    ),
    "A100": (
        {"capability": (8, 0)},
        {
            "flash_attn_3": "flash-attn 3 needs compute capability 9.0 to 9.0, and this GPU has 8.0",
            "cudnn": "cuDNN's kernel needs compute capability 9.0 or newer, and this GPU has 8.0",
        },
    ),
    "B200": ({"capability": (10, 0)}, {"flash_attn_3": "and this GPU has 10.0"}),
    "CPU": ({"device": torch.device("cpu"), "capability": None}, dict.fromkeys(KERNELS, "runs on GPUs only")),
}


@pytest.mark.parametrize("asked", REFUSED)
def test_table(asked: str) -> None:
    """Neither silently another result, nor a refusal of what a kernel can do."""
    changes, refused = REFUSED[asked]
    for name, kernel in KERNELS.items():
        reason = kernel.supports(request(**changes))
        if name in refused:
            assert reason is not None and reason.endswith(refused[name]), (name, reason)
        else:
            assert reason is None, (name, reason)


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({"capability": (8, 0)}, ["flash_attn_2", "varlen"]),
        ({"capability": (9, 0)}, ["flash_attn_3", "cudnn", "flash_attn_2", "varlen"]),
        ({"capability": (9, 0), "document_ids": True}, ["flash_attn_3", "flash_attn_2", "varlen", "cudnn"]),
        ({"capability": (10, 0)}, ["cudnn", "flash_attn_2", "varlen"]),
        ({"capability": None}, []),
        ({"device": torch.device("cpu"), "capability": None}, ["chunked"]),
    ],
)
def test_order_of_preference(changes: dict[str, Any], first: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest of each generation of GPUs comes first; elsewhere nothing has changed."""
    monkeypatch.setattr(matmul, "_is_slow_in_bf16", lambda: False)
    names = list(dict.fromkeys([*first, "sdpa", "chunked", "eager"]))
    assert list(preferred(request(**changes))) == names


def test_auto_skips_what_is_not_installed_and_says_what_refused() -> None:
    """A package that a user doesn't have is no news; one that refuses is."""
    assert choose(request()).describe() == "cudnn"
    served = choose(request(window=(31, 0)))
    check_sentence(served.describe(), "cuDNN's")
    assert choose(request(document_ids=True)).name == "varlen"
    assert choose(request(dropout=0.1)).name == "chunked"


def test_a_backend_that_is_not_installed_is_refused_by_name() -> None:
    """Never silently another one; a dry run, on tensors without memory, may be on a machine without the package."""
    with expect_error(ConfigError, "flash_attn_2", "2", "GPUs"):
        choose(request(device=torch.device("cpu"), capability=None), "flash_attn_2")
    with expect_error(ConfigError, "flash_attn_2"):
        choose(request(device=torch.device("cuda", 0)), "flash_attn_2")
    assert choose(request(), "flash_attn_2").name == "flash_attn_2"
