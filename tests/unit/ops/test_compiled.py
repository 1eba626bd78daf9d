"""--compile: the same numbers, without breaks and without compiling again."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from megatron.core.ops.activation import gated_activation, plain_activation
from megatron.core.ops.compiled import compile_bodies
from megatron.core.ops.norm import rms_norm
from megatron.core.ops.rotary import RotaryTable, apply_rotary
from megatron.core.parallel.mesh import Mesh
from megatron.core.tensor_parallel.cross_entropy import VocabularyPart, linear_cross_entropy
from megatron.errors import ConfigError
from tests.harness.sentences import expect_error

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def compiling_nothing_afterwards() -> Iterator[None]:
    yield
    compile_bodies(False, CPU)


def step() -> list[Tensor]:
    """A norm, two activations and a rotation, and the gradients."""
    generator = torch.Generator().manual_seed(1)
    x, weight, cos, sin = (
        torch.randn(shape, dtype=torch.float64, generator=generator)
        for shape in ((16, 2, 64), (64,), (16, 1, 1, 8), (16, 1, 1, 8))
    )
    x.requires_grad_()
    weight.requires_grad_()
    normed = plain_activation(rms_norm(x, weight, eps=1e-5), "squared_relu")
    inner = gated_activation(normed, "silu", limit=2.0, offset=1.0)
    out = apply_rotary(inner.view(16, 2, 2, 16), RotaryTable(cos, sin))
    torch.autograd.backward(out.square().sum())
    assert x.grad is not None and weight.grad is not None
    return [out.detach(), x.grad, weight.grad]


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of what torch itself does
@pytest.mark.slow  # a C++ compiler takes a second or more for each of eight functions
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
def test_compiled_functions_give_the_same_and_are_compiled_once() -> None:
    eager = step()
    before = counters["stats"]["unique_graphs"]
    compile_bodies(True, CPU)
    first = step()
    graphs = counters["stats"]["unique_graphs"]
    second = step()
    assert graphs - before == 8  # four functions, forward and backward
    assert counters["stats"]["unique_graphs"] == graphs and not counters["graph_break"]
    for a, b, c in zip(eager, first, second):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-9)
        assert torch.equal(b, c)


def loss_and_gradients(dtype: torch.dtype, cap: float | None) -> list[Tensor]:
    """Of an output layer of 50 ids, 6 of them padding."""
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(shape, generator=generator).to(dtype) for shape in ((24, 16), (50, 16)))
    hidden.requires_grad_()
    weight.requires_grad_()
    vocabulary = VocabularyPart(mesh=Mesh.single(), start=0, valid=44)
    labels, shares = torch.arange(24) % 44, torch.linspace(0, 1, 24)
    loss = linear_cross_entropy(hidden, weight, labels, shares, vocabulary=vocabulary, cap=cap)
    torch.autograd.backward(loss)
    assert hidden.grad is not None and weight.grad is not None
    return [loss.detach(), hidden.grad, weight.grad]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow  # as above
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.bfloat16, 2**-7)])
@pytest.mark.parametrize("cap", [None, 5.0])
def test_compiled_gradients_of_the_loss(dtype: torch.dtype, tolerance: float, cap: float | None) -> None:
    eager = loss_and_gradients(dtype, cap)
    before = counters["stats"]["unique_graphs"]
    compile_bodies(True, CPU)
    first, second = (loss_and_gradients(dtype, cap) for _ in range(2))
    assert counters["stats"]["unique_graphs"] == before + 1 and not counters["graph_break"]
    for a, b, c in zip(eager, first, second):
        torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance)
        assert torch.equal(b, c)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow  # as above
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
def test_more_shapes_than_torch_compiles_for() -> None:
    """Generated texts have any length; a shape too many would end the run."""
    weight = torch.randn(64, dtype=torch.float64)
    inputs = [torch.randn(length, 1, 64, dtype=torch.float64) for length in range(1, 20)]
    compile_bodies(True, CPU)
    before = counters["stats"]["unique_graphs"]
    found = [rms_norm(x, weight, eps=1e-5) for x in inputs]
    assert counters["stats"]["unique_graphs"] - before <= 3
    compile_bodies(False, CPU)
    for x, out in zip(inputs, found):
        torch.testing.assert_close(out, rms_norm(x, weight, eps=1e-5), rtol=1e-9, atol=1e-9)


def test_without_a_compiler_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else torch ends the first step with a page of its own."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    with expect_error(ConfigError, "--compile", "CPU"):
        compile_bodies(True, CPU)
    compile_bodies(False, CPU)
