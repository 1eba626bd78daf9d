"""What layers in FP8 send to each other, keep, and compute once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron.config.fp8 import Fp8Config
from megatron.core.ops.fp8_matmul import multiply
from megatron.core.ops.quantize import BLOCK, E4M3, E5M2, Quantized, blockwise, bytes_of, mxfp8
from megatron.core.parallel import collectives
from megatron.core.parallel.collectives import Handle
from megatron.core.parallel.low_precision import LowPrecision
from megatron.core.parallel.model_context import ModelContext
from megatron.core.tensor_parallel import fp8_linear, regions
from megatron.core.tensor_parallel.fp8_linear import delayed_scaling
from megatron.core.tensor_parallel.initialize import Normal, initialize
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from tests.harness import run_ranks

LENGTH, WIDTH, OUTPUTS = 64, 128, 32


def in_fp8(context: ModelContext, recipe: str, **settings: Any) -> ModelContext:
    fp8 = Fp8Config(**{"fp8_format": "e4m3", "fp8_recipe": recipe} | settings)
    context = dataclasses.replace(context, low_precision=LowPrecision(fp8, 2))
    return context.in_layer(0)


def layer_of(context: ModelContext, recipe: str, **settings: Any) -> ColumnParallelLinear:
    context = in_fp8(context, recipe, **settings)
    layer = ColumnParallelLinear(WIDTH, OUTPUTS, context, init=Normal(0.5), bias=True)
    initialize(layer, context.mesh, seed=1)
    delayed_scaling([layer], context)
    return layer


def step_of(layer: ColumnParallelLinear, *, trains: bool) -> AbstractContextManager[None]:
    """A step of the run that the layer belongs to."""
    assert layer.fp8 is not None
    return layer.fp8.context.low_precision.step(trains=trains)


def sent_by_a_column_layer(
    context: ModelContext, recipe: str, length: int
) -> tuple[dict[torch.dtype, int], list[tuple[int, int]]]:
    """Elements that are gathered, by type, and elements and bytes of an element of what is kept."""
    layer, sent, kept = layer_of(context, recipe), dict[torch.dtype, int](), list[Tensor]()
    gather, start = collectives.all_gather, collectives.all_gather_async

    def note(x: Tensor) -> None:
        sent[x.dtype] = sent.get(x.dtype, 0) + x.numel()

    def gathered(x: Tensor, *others: Any) -> Tensor:
        note(x)
        return gather(x, *others)

    def started(x: Tensor, *others: Any) -> Any:
        note(x)
        return start(x, *others)

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    x = torch.randn(length // 2, 1, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    with mock.patch.multiple(fp8_linear, all_gather=gathered, all_gather_async=started):
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = layer(x)
        out.sum().backward()
    return sent, [(each.numel(), each.dtype.itemsize) for each in kept]


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
def test_sequence_parallel_ranks_gather_bytes(recipe: str) -> None:
    """For the product and, again, for the weight's gradient: half of what bf16 would take, and scales of blocks."""
    part = LENGTH // 2 * WIDTH
    for sent, kept in run_ranks(
        sent_by_a_column_layer, recipe, LENGTH, tp=2, sequence_parallel=True, dtype=torch.bfloat16
    ):
        assert sent == {torch.uint8: 2 * part + (2 * part // 32 if recipe == "mxfp8" else 0)}
        assert {size for count, size in kept if count >= part} == {1}


def test_parts_of_the_sequence_that_cut_blocks_are_kept_and_gathered_in_bf16() -> None:
    """32 rows of two ranks share scales in the gradient of the weight: they are scaled together."""
    part = LENGTH // 4 * WIDTH
    for sent, kept in run_ranks(
        sent_by_a_column_layer, "mxfp8", LENGTH // 2, tp=2, sequence_parallel=True, dtype=torch.bfloat16
    ):
        assert sent == {torch.uint8: part + part // 32, torch.bfloat16: part}
        assert kept == [(part, 2)]


def order_of_a_backward_pass(context: ModelContext) -> list[str]:
    """What a layer does, in order."""
    layer, done = layer_of(context, "tensorwise"), list[str]()

    def noted(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def note(*given: Any, **named: Any) -> Any:
            done.append(what)
            return function(*given, **named)

        return note

    out = layer(torch.randn(LENGTH // 2, 1, WIDTH, dtype=context.dtype, requires_grad=True))
    scatter = noted("begin to sum", collectives.reduce_scatter_async)
    with (
        mock.patch.multiple(fp8_linear, reduce_scatter_async=scatter, multiply=noted("multiply", multiply)),
        mock.patch.object(Handle, "wait", noted("wait", Handle.wait)),
    ):
        out.sum().backward()
    return done


def test_input_gradients_are_summed_while_the_weight_s_is_computed() -> None:
    """As of layers in bf16: with FP8 ranks waited for the sum, and only then computed."""
    for done in run_ranks(order_of_a_backward_pass, tp=2, sequence_parallel=True, dtype=torch.bfloat16):
        assert [each for each in done if each != "wait"] == ["multiply", "begin to sum", "multiply"]
        assert done[-1] == "wait"


def gathered_by_a_row_layer(context: ModelContext, recipe: str, wgrad: bool) -> dict[torch.dtype, int]:
    """Elements of gradients of the output that are gathered, by type."""
    inside = in_fp8(context, recipe, fp8_wgrad=wgrad)
    layer = RowParallelLinear(WIDTH, OUTPUTS, inside, init=Normal(0.5), bias=True)
    initialize(layer, context.mesh, seed=1)
    delayed_scaling([layer], context)
    sent, gather = dict[torch.dtype, int](), collectives.all_gather

    def gathered(x: Tensor, *others: Any) -> Tensor:
        sent[x.dtype] = sent.get(x.dtype, 0) + x.numel()
        return gather(x, *others)

    out = layer(torch.randn(LENGTH, 1, WIDTH // 2, dtype=torch.bfloat16, requires_grad=True))
    assert out.shape == (LENGTH // 2, 1, OUTPUTS)
    with mock.patch.object(fp8_linear, "all_gather", gathered), mock.patch.object(regions, "all_gather", gathered):
        out.sum().backward()
    return sent


@pytest.mark.parametrize(
    ("recipe", "wgrad", "dtype"),
    [
        ("tensorwise", True, torch.uint8),
        ("delayed", True, torch.uint8),
        ("blockwise", True, torch.bfloat16),
        ("delayed", False, torch.bfloat16),
    ],
)
def test_gradients_with_one_scale_are_gathered_in_bytes(recipe: str, wgrad: bool, dtype: torch.dtype) -> None:
    """Blocks would have to be gathered for both directions, and a bf16 gradient of the weight needs bf16."""
    for sent in run_ranks(gathered_by_a_row_layer, recipe, wgrad, tp=2, sequence_parallel=True, dtype=torch.bfloat16):
        assert sent == {dtype: LENGTH // 2 * OUTPUTS}


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise", "mxfp8"])
def test_weights_are_quantized_once_a_step(recipe: str) -> None:
    """Not once a microbatch; and anew in the next step, since an optimizer changes them between steps."""
    context = ModelContext.single(dtype=torch.bfloat16)
    layer = layer_of(context, recipe)
    assert layer.fp8 is not None
    quantizer, x = layer.fp8.quantizer, torch.randn(LENGTH, 1, WIDTH, dtype=torch.bfloat16)
    with mock.patch.object(quantizer, "quantize_each", wraps=quantizer.quantize_each) as calls:
        for _ in range(2):
            with step_of(layer, trains=True):
                for _ in range(3):
                    layer(x.requires_grad_()).sum().backward()
    assert sum(call.args[1] is quantizer.weight for call in calls.call_args_list) == 2


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise", "mxfp8"])
def test_weights_of_a_step_are_forgotten_after_it(recipe: str) -> None:
    """A pass outside of steps, as generation's or a test's, multiplies by the weights of now."""
    context = ModelContext.single(dtype=torch.float32)
    layer, x = layer_of(context, recipe), torch.randn(4, 1, WIDTH)
    with torch.no_grad():
        with step_of(layer, trains=False):
            before = layer(x)
        layer.weight.mul_(-1)
        torch.testing.assert_close(layer(x) - layer.bias, -(before - layer.bias), rtol=0, atol=0)


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_each_direction_has_blocks_of_its_own(recipe: str) -> None:
    """Blocks lie along the dimension that a product sums over; only the squares of a weight serve both directions."""
    layer = layer_of(ModelContext.single(dtype=torch.float32), recipe)
    assert layer.fp8 is not None
    quantizer, x = layer.fp8.quantizer, torch.randn(160, 288)
    for role in quantizer.roles:
        found, is_square = quantizer.quantize(x, role), role is quantizer.weight and recipe == "blockwise"
        assert found.across is not None and found.along is not None
        for operand, given in ((found.across, x), (found.along, x.t().contiguous())):
            wanted = mxfp8(given) if recipe == "mxfp8" else blockwise(given, E4M3, rows=BLOCK if is_square else 1)
            assert operand.block == wanted.block and torch.equal(operand.scales, wanted.scales)
            assert torch.equal(bytes_of(operand.data), bytes_of(wanted.data))


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise", "mxfp8"])
def test_kernels_get_weights_in_order_of_memory(recipe: str) -> None:
    """In both directions, once a step: else each product would copy its weight."""
    layer = layer_of(ModelContext.single(dtype=torch.float32), recipe)
    assert layer.fp8 is not None
    layer.fp8.quantizer.by = "device"
    (weight,) = layer.fp8.quantizer.quantize_weights(layer.weight)
    assert weight.across is not None and weight.along is not None
    assert weight.across.data.is_contiguous() and weight.along.data.is_contiguous()


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8"])
def test_gradients_of_weights_without_fp8(recipe: str) -> None:
    """--no-fp8-wgrad: exactly those of the numbers as they came, which then aren't kept in 8 bits."""
    context = ModelContext.single(dtype=torch.float32)
    layer, x = layer_of(context, recipe, fp8_wgrad=False), torch.randn(LENGTH, 1, WIDTH, requires_grad=True)
    grad = torch.randn(LENGTH, 1, OUTPUTS)
    layer(x).backward(grad)
    torch.testing.assert_close(layer.weight.grad, grad[:, 0].t() @ x.detach()[:, 0], rtol=1e-6, atol=1e-5)
    assert layer.bias is not None and layer.bias.grad is not None
    torch.testing.assert_close(layer.bias.grad, grad.sum((0, 1)), rtol=1e-6, atol=1e-5)


def test_biases_are_added() -> None:
    """With gradients and without: in the rank's type, after the product."""
    layer, x = layer_of(ModelContext.single(dtype=torch.float32), "mxfp8"), torch.randn(4, 1, WIDTH)
    assert layer.bias is not None
    with torch.no_grad():
        plain = layer(x)
        layer.bias.add_(torch.arange(OUTPUTS))
    for found in (layer(x), layer(x.requires_grad_()).detach(), torch.no_grad()(layer)(x)):
        torch.testing.assert_close(found, plain + layer.bias.detach(), rtol=1e-6, atol=1e-5)


def test_sums_of_the_forward_pass_alone_may_be_fast() -> None:
    """As in Transformer Engine: gradients are added up in fp32."""
    layer, found = layer_of(ModelContext.single(dtype=torch.float32), "tensorwise"), list[bool]()

    def noted(*given: Any, is_fast: bool = False, **named: Any) -> Tensor:
        found.append(is_fast)
        return multiply(*given, **named)

    with mock.patch.object(fp8_linear, "multiply", noted):
        layer(torch.randn(4, 1, WIDTH, requires_grad=True)).sum().backward()
    assert found == [True, False, False]


@pytest.mark.parametrize(("fmt", "of_gradients"), [("e4m3", E4M3), ("hybrid", E5M2)])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_formats_of_products(recipe: str, fmt: str, of_gradients: torch.dtype) -> None:
    """Layouts agree on the wrong format, too; gradients in E4M3 lose the range for which hybrid is chosen."""
    context = ModelContext.single(dtype=torch.float32)
    layer, found = layer_of(context, recipe, fp8_format=fmt), list[tuple[torch.dtype, torch.dtype]]()

    def noted(a: Quantized, b: Quantized, *given: Any, **named: Any) -> Tensor:
        found.append((a.data.dtype, b.data.dtype))
        return multiply(a, b, *given, **named)

    with mock.patch.object(fp8_linear, "multiply", noted):
        layer(torch.randn(4, 1, WIDTH, requires_grad=True)).sum().backward()
    assert found == [(E4M3, E4M3), (of_gradients, E4M3), (of_gradients, E4M3)]


def test_generation_multiplies_in_the_weights_own_format() -> None:
    """Its results would depend on which other requests there are, whose largest values set the scales."""
    context = ModelContext.single(dtype=torch.float32)
    layer, x = layer_of(context, "tensorwise"), torch.randn(4, 1, WIDTH)
    expected = torch.nn.functional.linear(x, layer.weight, layer.bias)
    with torch.no_grad():
        assert not torch.equal(layer(x), expected)
        with context.products.by(lambda x, weight, bias: torch.nn.functional.linear(x, weight, bias)):
            torch.testing.assert_close(layer(x), expected, rtol=0, atol=0)


def test_delayed_scales_follow_the_largest_values_of_steps() -> None:
    """Of training steps alone: evaluation sees other data. NaN and zero leave scales where they are."""
    context = ModelContext.single(dtype=torch.float32)
    layer = layer_of(context, "delayed", fp8_margin=1, fp8_amax_history_len=3, fp8_amax_compute_algo="max")
    scaling = layer.fp8.quantizer.scaling[0] if layer.fp8 and layer.fp8.quantizer.scaling else None
    assert scaling is not None
    seen = []
    for size in (2.0, 0.5, 1.0, float("nan"), 0.0, 4.0):
        with step_of(layer, trains=True):
            layer(torch.full((2, 1, WIDTH), size))
            seen.append(scaling.scale(0).item())
        scaling.update()
    assert seen[:4] == [1.0, 448 / 2 / 2.0, 448 / 2 / 2.0, 448 / 2 / 2.0]
    before = scaling.scale(0).item()
    with torch.no_grad(), step_of(layer, trains=False):
        layer(torch.full((2, 1, WIDTH), 100.0))
    assert scaling.scale(0).item() == before
    with step_of(layer, trains=True):
        layer(torch.full((2, 1, WIDTH), 4.0))
    scaling.update()
    assert scaling.scale(0).item() == before == 448 / 2 / 4.0


def test_each_tensor_of_a_layer_has_a_delayed_scale_of_its_own() -> None:
    """From its own largest value and for its own format."""
    context = ModelContext.single(dtype=torch.float32)
    layer = layer_of(context, "delayed", fp8_format="hybrid")
    assert layer.fp8 is not None and layer.fp8.quantizer.scaling is not None
    x = torch.full((2, 1, WIDTH), 2.0, requires_grad=True)
    with step_of(layer, trains=True):
        (layer(x) * 0.5).sum().backward()
    layer.fp8.quantizer.scaling[0].update()
    scales = [layer.fp8.quantizer.scaling[0].scale(number).item() for number in range(3)]
    assert scales == [448 / 2, pytest.approx(448 / layer.weight.abs().max().item(), rel=1e-6), 57344 / 0.5]


def test_frozen_weights_pass_gradients_on() -> None:
    """They keep no input, and have no gradient of their own."""
    context = ModelContext.single(dtype=torch.float32)
    layer = RowParallelLinear(WIDTH, OUTPUTS, in_fp8(context, "mxfp8"), init=Normal(0.5), bias=False)
    initialize(layer, context.mesh, seed=1)
    layer.weight.requires_grad_(False)
    kept: list[Tensor] = []
    x = torch.randn(LENGTH, 1, WIDTH, requires_grad=True)

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    assert layer.fp8 is not None
    quantizer = layer.fp8.quantizer
    with mock.patch.object(quantizer, "quantize", wraps=quantizer.quantize) as calls:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = layer(x)
        out.sum().backward()
    assert kept == [] and layer.weight.grad is None
    assert [call.kwargs["along"] for call in calls.call_args_list] == [False, False]
    assert x.grad is not None
    expected = layer.weight.sum(0).expand(LENGTH, 1, WIDTH)
    torch.testing.assert_close(x.grad, expected, rtol=0.1, atol=0.5)
