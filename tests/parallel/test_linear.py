"""What the split layers keep for their backward pass, and when weights get their gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from megatron.config.fp8 import Fp8Config
from megatron.core.distributed.buffers import build_buffers
from megatron.core.distributed.grad_sync import GradSync
from megatron.core.moe.grouped_linear import GroupedLinear
from megatron.core.ops import matmul
from megatron.core.ops.grouped_matmul import Groups, Loop
from megatron.core.ops.matmul import transposed_times
from megatron.core.parallel.collectives import Handle, all_reduce, reduce_scatter_async
from megatron.core.parallel.low_precision import LowPrecision
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.recompute import recomputed
from megatron.core.parallel.weight_gradients import WeightGradients
from megatron.core.tensor_parallel import linear as linear_module
from megatron.core.tensor_parallel.initialize import Normal
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.linear import added_at_once, linear
from megatron.core.tensor_parallel.regions import all_rows, own_rows
from tests.harness import run_ranks

LENGTH, WIDTH = 6, 8


def kept_by_a_column_layer(context: ModelContext) -> tuple[int, bool]:
    """Elements kept of the sequence, and whether the gradients are those of a plain product of the whole."""
    layer = ColumnParallelLinear(WIDTH, 4, context, init=Normal(0.5), bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(layer.weight.numel()).view_as(layer.weight) + context.mesh.rank("tp"))
    whole = torch.randn(LENGTH, 1, WIDTH, generator=torch.Generator().manual_seed(1), dtype=context.dtype)
    part = whole.chunk(context.mesh.size("tp"))[context.mesh.rank("tp")].clone().requires_grad_()
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = layer(part)
    torch.autograd.backward(out.square().sum())
    weight = layer.weight.detach().clone().requires_grad_()
    torch.autograd.backward((whole @ weight.t()).square().sum())
    assert layer.weight.grad is not None and weight.grad is not None
    inputs = [tensor for tensor in kept if tensor.shape[-1] == WIDTH and tensor.dim() == 3]
    return sum(tensor.numel() for tensor in inputs), torch.allclose(layer.weight.grad, weight.grad)


def test_sequence_parallel_layer_keeps_its_part_of_the_sequence() -> None:
    """The gathered input is the largest tensor of a layer: kept, it would undo what sequence parallelism saves."""
    for kept, right in run_ranks(kept_by_a_column_layer, tp=2, sequence_parallel=True, dtype=torch.float64):
        assert right
        assert kept == LENGTH * WIDTH // 2


def products_in_fp32(context: ModelContext, freezes: bool) -> list[bool]:
    """Whether a bf16 layer gives the same bits with and without gradients, and where its gradients are those of a plain
    product of the whole: of the input's part, and of the weight, if it is not frozen.
    """
    generator = torch.Generator().manual_seed(1)
    layer = ColumnParallelLinear(WIDTH, 4, context, init=Normal(0.5), bias=False)
    torch.nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(2 + context.mesh.rank("tp")))
    layer.requires_grad_(not freezes)
    whole = torch.randn(128, 1, WIDTH, generator=generator).to(context.dtype).requires_grad_()
    size, rank = context.mesh.size("tp"), context.mesh.rank("tp")
    part = (whole.detach().chunk(size)[rank] if context.sequence_parallel else whole.detach()).requires_grad_()
    with patch.object(matmul, "_is_slow_in_bf16", lambda: True):
        out = layer(part)
        with torch.no_grad():
            again = layer(part)
        torch.autograd.backward(out.float().square().sum())
    weight = layer.weight.detach().double().requires_grad_()
    torch.autograd.backward((whole.double() @ weight.t()).square().sum())
    assert whole.grad is not None and weight.grad is not None and part.grad is not None
    expected = all_reduce(whole.grad.float(), context.mesh, "tp")
    if context.sequence_parallel:
        expected = expected.chunk(size)[rank]
    found = [torch.equal(out, again), near(part.grad, expected)]
    return [*found, layer.weight.grad is None if freezes else near(layer.weight.grad, weight.grad)]


def near(found: Tensor | None, expected: Tensor) -> bool:
    """But for rounding to bf16."""
    return found is not None and bool((found - expected).abs().max() < 0.02 * expected.abs().max())


@pytest.mark.parametrize("freezes", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_products_in_fp32_of_bf16_layers(sequence_parallel: bool, freezes: bool) -> None:
    """Trained and frozen, gathering or not; the same bits in evaluation and where a layer is recomputed."""
    layer = partial(products_in_fp32, freezes=freezes)
    for found in run_ranks(layer, tp=2, sequence_parallel=sequence_parallel, dtype=torch.bfloat16):
        assert found == [True] * 3


def order_of_a_backward_pass(context: ModelContext) -> tuple[list[str], bool]:
    """What a layer's backward pass does, in order, and whether the gradient of its input is that of a plain product."""
    done: list[str] = []
    layer = ColumnParallelLinear(WIDTH, 4, context, init=Normal(0.5), bias=False)
    with torch.no_grad():
        layer.weight.fill_(context.mesh.rank("tp") + 1.0)
    part = torch.ones(LENGTH // 2, 1, WIDTH, dtype=context.dtype, requires_grad=True)
    scatter, wait, product = reduce_scatter_async, Handle.wait, transposed_times

    def note(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*given: Any, **named: Any) -> Any:
            done.append(what)
            return function(*given, **named)

        return noted

    out = layer(part)
    with (
        patch.object(linear_module, "reduce_scatter_async", note("begin to sum", scatter)),
        patch.object(linear_module, "transposed_times", note("multiply", product)),
        patch.object(Handle, "wait", note("wait", wait)),
    ):
        torch.autograd.backward(out.sum())
    assert part.grad is not None
    return done, bool((part.grad == 2 * 1.0 + 2 * 2.0).all())  # two columns on each rank


def test_input_gradients_are_summed_while_the_weight_s_is_computed() -> None:
    """Ranks would wait for the sum, and only then compute; or the next layer would read sums that aren't there yet."""
    for done, right in run_ranks(order_of_a_backward_pass, tp=2, sequence_parallel=True, dtype=torch.float64):
        assert right
        assert done == ["begin to sum", "wait", "multiply", "wait"]


def test_a_gradient_that_waits_is_of_any_input() -> None:
    """What attention makes of one head and several samples lies sample by sample: zero-bubble schedules stopped there
    with an error of torch's.
    """
    context, generator = ModelContext.single(dtype=torch.float64), torch.Generator().manual_seed(1)
    context = dataclasses.replace(context, weight_gradients=WeightGradients(may_wait=True))
    x = torch.randn(3, LENGTH, WIDTH, generator=generator, dtype=context.dtype).transpose(0, 1)
    weight = torch.randn(4, WIDTH, generator=generator, dtype=context.dtype, requires_grad=True)
    torch.autograd.backward(linear(x, weight, None, context).square().sum())
    plain = weight.detach().clone().requires_grad_()
    torch.autograd.backward((x @ plain.t()).square().sum())
    torch.testing.assert_close(weight.grad, plain.grad)


def test_gradient_of_a_weight_with_other_uses_is_added_at_once() -> None:
    """A tied matrix's gradient, the largest of all, would wait beside every activation's for the embedding's."""
    weight = torch.ones(2, 2, requires_grad=True)
    seen: list[float] = []
    x = (weight * 3.0).sum(0)  # the earlier use, whose backward pass comes last
    x.register_hook(lambda _: seen.append(0.0 if weight.grad is None else weight.grad.sum().item()))  # type: ignore[no-untyped-call]
    torch.autograd.backward((added_at_once(weight, WeightGradients()) @ x).sum())
    assert seen == [24.0]  # the later use's gradient, x on either row, is there already
    assert weight.grad is not None and weight.grad.tolist() == [[12.0, 12.0], [12.0, 12.0]]
    with torch.no_grad():
        assert added_at_once(weight, WeightGradients()) is weight


def test_a_weights_gradient_is_added_to_its_sum_without_autograd() -> None:
    """--gradient-accumulation-fusion: else autograd makes a tensor of each gradient before it adds it."""
    context, generator = ModelContext.single(dtype=torch.bfloat16), torch.Generator().manual_seed(1)
    context = dataclasses.replace(context, weight_gradients=WeightGradients(fuses_accumulation=True))
    layer = ColumnParallelLinear(WIDTH, 4, context, init=Normal(0.5), bias=False)
    torch.nn.init.ones_(layer.weight)
    (buffer,) = build_buffers(layer.named_parameters(), context, grad_dtype=torch.float32)
    sync = GradSync([buffer], context, sharded=False, overlap=True, weight_gradients=context.weight_gradients)
    seen: list[Tensor] = []
    layer.weight.register_post_accumulate_grad_hook(seen.append)  # type: ignore[no-untyped-call]
    x = torch.randn(3, WIDTH, generator=generator).bfloat16()
    with sync.last_backward():
        for _ in range(2):
            torch.autograd.backward(layer(x).float().sum())
    sync.finish()
    assert not seen and layer.weight.grad is None
    expected = 2 * x.sum(0, dtype=torch.float32).expand(4, -1)
    torch.testing.assert_close(buffer.grads[: 4 * WIDTH].view(4, WIDTH), expected, atol=0.1, rtol=0)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("fp8", [Fp8Config(), Fp8Config(fp8_format="e4m3", fp8_recipe="tensorwise")], ids=["", "fp8"])
def test_gradients_of_recomputed_layers_do_not_wait(fp8: Fp8Config, recomputes: bool) -> None:
    """Until then each product would keep the input that recomputation is there to forget."""
    gradients, low_precision = WeightGradients(may_wait=True), LowPrecision(fp8, 1)
    context = ModelContext.single(dtype=torch.float32)
    context = dataclasses.replace(context, weight_gradients=gradients, low_precision=low_precision)
    layer = RowParallelLinear(16, 16, context.in_layer(0), init=Normal(0.5), bias=False)
    experts = GroupedLinear(Loop(), context)
    weight = nn.Parameter(torch.randn(1, 16, 16))
    groups = Groups(torch.tensor([3]))

    def run(x: Tensor) -> Tensor:
        return experts(layer(x).view(3, 16), weight, groups)

    x = torch.randn(3, 1, 16, requires_grad=True)
    with context.low_precision.step(trains=True):
        out = recomputed(run, x) if recomputes else run(x)
        with context.weight_gradients.left_for_later() as work:
            out.sum().backward()  # type: ignore[no-untyped-call]
    assert len(work) == (0 if recomputes else 2)
    assert (layer.weight.grad is not None) == (weight.grad is not None) == recomputes


def rows_there_and_back(context: ModelContext, count: int) -> tuple[list[float], list[float], int]:
    """Each row doubled by the rank that has it, the gradient of all rows, and how many rows this rank has."""
    rows = torch.arange(1.0, count + 1).unsqueeze(1).requires_grad_()
    mine = own_rows(rows, context)
    doubled = all_rows(2 * mine, context, rows=count)
    doubled.square().sum().backward()  # type: ignore[no-untyped-call]
    assert rows.grad is not None
    return doubled.flatten().tolist(), rows.grad.flatten().tolist(), len(mine)


@pytest.mark.parametrize("count", [1, 5, 8])
def test_each_row_is_at_one_rank_also_where_they_do_not_divide(count: int) -> None:
    """Experts get their tokens so: the last tokens of a text of odd length would reach none."""
    for doubled, gradients, held in run_ranks(rows_there_and_back, count, tp=4):
        assert doubled == [2.0 * row for row in range(1, count + 1)]
        assert gradients == [8.0 * row for row in range(1, count + 1)]
        assert held == -(-count // 4)
