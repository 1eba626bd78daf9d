"""Rounded operands: the values that an export has, and straight-through gradients."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron.core.conversion.huggingface.stored_codes import dequantized
from megatron.core.conversion.portable import LazyTensor
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.model_context import ModelContext
from megatron.core.quantization.fake import FakeQuantized
from megatron.core.quantization.grid import rounded
from megatron.core.quantization.scheme import scheme_named
from megatron.core.tensor_parallel.initialize import Constant
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.errors import ConfigError
from megatron.training.run.quantization import trained_operands
from tests.harness.runs import tiny_config
from tests.harness.sentences import expect_error

NAMED = [("int4", 8), ("int4-asym", 8), ("w8a8", None), ("fp8", None), ("fp8-tensor", None)]


@pytest.mark.parametrize(("name", "group"), NAMED)
def test_gradients_are_those_of_the_rounded_operands(name: str, group: int | None) -> None:
    """y = x̂·Ŵᵀ, dx = dy·Ŵ and dW = dyᵀ·x̂: nothing is lost on the way through the rounding."""
    scheme = scheme_named(name, group_size=group)
    operands = FakeQuantized(scheme, Mesh.single())
    context = ModelContext.on(
        ParallelContext.single(dtype=torch.float64),
        weight_gradients=ModelContext.single().weight_gradients,
        low_precision=ModelContext.single().low_precision,
        products=ModelContext.single().products,
        operands=operands,
    )
    layer = ColumnParallelLinear(16, 6, context.in_layer(0), init=Constant(0.0), bias=False)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(6, 16, generator=generator))
    x = torch.randn(5, 2, 16, generator=generator, dtype=torch.float64).requires_grad_()
    grad = torch.randn(5, 2, 6, generator=generator, dtype=torch.float64)
    with operands.step():
        y = layer(x)
        y.backward(grad)
    weight = rounded(layer.weight.detach(), scheme.weights)
    rows = x.detach().flatten(0, 1)
    if scheme.activations is not None:
        rows = rounded(rows, dataclasses.replace(scheme_named(name).weights, block=(1, 0)))
    assert not torch.equal(weight, layer.weight)
    torch.testing.assert_close(y.flatten(0, 1), rows @ weight.t())
    assert x.grad is not None and layer.weight.grad is not None
    torch.testing.assert_close(x.grad, grad @ weight)
    torch.testing.assert_close(layer.weight.grad, grad.flatten(0, 1).t() @ rows)
    outside = ColumnParallelLinear(16, 6, context.in_layer(None), init=Constant(0.1), bias=False)
    with torch.no_grad():
        outside.weight.fill_(0.1)
    assert torch.equal(outside(x), x @ outside.weight.t())


@pytest.mark.parametrize(("name", "group"), NAMED)
def test_a_weight_is_what_an_export_makes_of_it(name: str, group: int | None) -> None:
    """In bf16, where FP8 was trained with scales in bf16 and exported with others, in fp32: one code in 50 differed."""
    scheme = scheme_named(name, group_size=group)
    layer = ColumnParallelLinear(16, 6, ModelContext.single(dtype=torch.bfloat16), init=Constant(0.0), bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(6, 16, generator=torch.Generator().manual_seed(2)))
    found = FakeQuantized(scheme, Mesh.single()).weight(layer.weight)()
    weight = LazyTensor((6, 16), torch.bfloat16, layer.weight.detach)
    exported = dequantized("weight", weight, scheme, None, torch.bfloat16, in_fp32=False).make()
    assert found.dtype == torch.bfloat16 and torch.equal(found, exported.bfloat16())


def test_mistakes() -> None:
    """Groups that don't divide, or that there are none of, and two grids at once."""
    qat = "--mock-data --quantization-aware-training"
    with expect_error(ConfigError, "--qat-group-size 24", "16"):
        trained_operands(tiny_config(f"{qat} int4 --qat-group-size 24"), Mesh.single())
    with expect_error(ConfigError, "--qat-group-size 16", "int4", "int3"):
        tiny_config(f"{qat} int8 --qat-group-size 16")
    with expect_error(ConfigError, "--quantization-aware-training int8", "--lora-rank 2"):
        tiny_config(f"{qat} int8 --lora-rank 2 --pretrained-checkpoint unread")
    with expect_error(ConfigError, "--quantization-aware-training int8", "--fp8-format hybrid"):
        tiny_config(f"{qat} int8 --bf16 --fp8-format hybrid")
