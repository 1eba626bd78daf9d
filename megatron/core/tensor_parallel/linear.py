"""The matrix product of all layers.

Its backward pass can be split: gradients of inputs now, of weights later. With sequence parallelism the gathered input
isn't kept, but gathered again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from megatron.core.ops import matmul
from megatron.core.ops.matmul import add_transposed_times, is_faster_in_fp32, multiplied, transposed_times
from megatron.core.parallel.collectives import Handle, all_gather, all_gather_async, reduce_scatter_async
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.recompute import will_be_recomputed
from megatron.core.parallel.weight_gradients import WeightGradients
from megatron.core.tensor_parallel.fp8_linear import Fp8Linear
from megatron.core.tensor_parallel.regions import enter


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    context: ModelContext,
    *,
    gathers: bool = False,
    fp8: Fp8Linear | None = None,
) -> Tensor:
    """``x·weightᵀ + bias``: [..., in] -> [..., out]. The weight's gradient may be left for later: see ``_Linear``, and
    is added to those before it without a tensor of its own where ``context.weight_gradients`` has their sum.

    ``gathers``: ``x`` [s, b, in] is this rank's part of the sequence and the product is that of all, [S, b, out].
    ``fp8``: computes it in 8 bits, except for generation, which has products of its own.
    """
    if fp8 is not None and is_in_8_bits(context):
        return fp8(x, weight, bias, gathers=gathers)
    gradients, replaces = context.weight_gradients, context.replaces_operands
    if replaces:
        x = context.operands.rows(x, weight)
    by_hand = replaces or gathers or gradients.may_wait or gradients.fuses_accumulation
    by_hand = by_hand or is_faster_in_fp32(x.dtype, x.device)
    asked = context.operands.weight(weight) if replaces else weight.detach
    if not (by_hand and torch.is_grad_enabled()):
        used = asked() if replaces else weight
        return matmul.linear(enter(x, context) if gathers else x, used, bias, by=context.products.multiply)
    add_gradient = None
    if weight.requires_grad:
        add_gradient = partial(add_weight_gradient, weight, context)
        if not x.requires_grad:
            x = x.detach().requires_grad_()  # else there is no backward pass, as autograd doesn't see the weight
    return _Linear.apply(x, bias, asked, add_gradient, context, gathers)  # type: ignore[no-untyped-call, no-any-return]


def is_in_8_bits(context: ModelContext) -> bool:
    """Whether a layer with products in 8 bits uses them now."""
    return torch.is_grad_enabled() or context.products.multiply is None


class _Linear(torch.autograd.Function):
    """y = x·Wᵀ + b;  dx = dy·W and db = Σ dy at once,  dW = dyᵀ·x at once or later.

    With ``gathers``, x is this rank's part of the sequence: y = gather(x)·Wᵀ + b, dx = reduce_scatter(dy·W). While
    dy·W is computed x is gathered again for dW, and while dW is computed dx is summed (arXiv:2205.05198).

    The weight is no input of the function, because autograd would call the weight's hooks before a later gradient is
    computed; it is ``asked`` for in both passes, so that what stands for it needs no memory in between.
    ``add_gradient``, None for a frozen weight, hands the gradient to autograd once it is computed: autograd adds it to
    ``weight.grad`` and calls the hooks, as for any other parameter. Gradients of biases, norms, embeddings and the
    output matrix are never left for later: they are cheap, or were computed in the forward pass.
    """

    @staticmethod
    @override
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        asked: Callable[[], Tensor],
        add_gradient: Callable[[Tensor, Tensor], None] | None,
        context: ModelContext,
        gathers: bool,
    ) -> Tensor:
        ctx.save_for_backward(*(() if add_gradient is None else (x,)))
        ctx.asked, ctx.add_gradient, ctx.context, ctx.gathers = asked, add_gradient, context, gathers
        ctx.at_once = will_be_recomputed()
        return matmul.linear(all_gather(x, context.mesh, "tp") if gathers else x, asked(), bias)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        context, gathers, rows = ctx.context, ctx.gathers, grad.flatten(0, -2)
        handles = [all_gather_async(x, context.mesh, "tp") if gathers else Handle(x) for x in ctx.saved_tensors]
        grad_x = multiplied(torch.matmul, grad, ctx.asked())
        scattering = reduce_scatter_async(grad_x, context.mesh, "tp") if gathers else Handle(grad_x)
        for whole in handles:
            work = partial(ctx.add_gradient, rows, whole.wait().flatten(0, -2))
            context.weight_gradients.do(work, at_once=ctx.at_once)
        return scattering.wait(), rows.sum(0) if ctx.needs_input_grad[1] else None, None, None, None, None


@torch.no_grad()
def add_weight_gradient(weight: Tensor, context: ModelContext, grad_rows: Tensor, rows: Tensor) -> None:
    """Add ``grad_rowsᵀ·rows`` to the weight's sum of gradients, if there is one, or let autograd accumulate it."""
    main_grad = context.weight_gradients.main_grad_of(weight)
    if main_grad is not None:
        main_grad.opened()
        add_transposed_times(main_grad.sum, grad_rows, rows)
        main_grad.added()
        return
    torch.autograd.backward(weight, transposed_times(grad_rows, rows).contiguous())


def added_at_once(weight: Tensor, weight_gradients: WeightGradients) -> Tensor:
    """A copy without memory of a weight that is used several times: accumulates this use's gradient immediately, where
    autograd would keep it until it has those of all uses.
    """
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return weight
    anchor = torch.empty(0, requires_grad=True)  # makes autograd call the backward pass without the weight as an input
    add = weight_gradients.added.get(weight, partial(torch.autograd.backward, weight))
    return _AddedAtOnce.apply(anchor, weight.detach(), add)  # type: ignore[no-untyped-call, no-any-return]


def read_in_forward_alone(weight: Tensor) -> Tensor:
    """The weight, none of whose values the backward pass of what the caller computes needs: where ranks divide weights,
    they don't gather it again for that.
    """
    acquire: Callable[..., bool] | None = getattr(weight, "acquired_on_reading", None)
    if acquire is not None:
        acquire(for_backward=False)
    return weight


class _AddedAtOnce(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, anchor: Tensor, weight: Tensor, add_gradient: Callable[[Tensor], None]) -> Tensor:
        ctx.add_gradient = add_gradient
        return weight.view_as(weight)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.add_gradient(grad)
        return None, None, None
