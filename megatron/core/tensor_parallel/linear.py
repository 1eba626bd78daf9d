"""The matrix product of all layers, whose backward pass can be split: gradients of inputs now, of weights later."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.ops.matmul import transposed_times
from megatron.core.parallel.weight_gradients import WeightGradients


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, gradients: WeightGradients) -> Tensor:
    """``x·weightᵀ + bias``: [..., in] -> [..., out]; ``gradients`` says when the weight's gradient is computed."""
    if not (gradients.may_wait and torch.is_grad_enabled() and weight.requires_grad):
        return F.linear(x, weight, bias)
    if not x.requires_grad:
        x = x.detach().requires_grad_()  # the weight, which autograd doesn't see, needs a backward pass all the same
    result: Tensor = _SplitLinear.apply(x, bias, weight.detach(), partial(_add_gradient, weight), gradients)  # type: ignore[no-untyped-call]
    return result


class _SplitLinear(torch.autograd.Function):
    """y = x·Wᵀ + b;  dx = dy·W and db = Σ dy at once,  dW = dyᵀ·x at once or later.

    Autograd would take a gradient that comes later for none and tell the hooks on the weight so; it isn't shown it.
    Brought when it is computed, the gradient takes the way of any other: autograd adds it to ``weight.grad`` and calls
    the hooks, so buffers, counts and overlapped reductions see no difference. Biases, norms, embeddings and the output
    matrix have cheap gradients, or made theirs in the forward pass; they don't wait.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        weight: Tensor,
        add_gradient: Callable[[Tensor, Tensor], None],
        gradients: WeightGradients,
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.add_gradient, ctx.gradients = weight, add_gradient, gradients
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,), rows = ctx.saved_tensors, grad.flatten(0, -2)
        work = partial(ctx.add_gradient, rows, x.flatten(0, -2))
        gradients: WeightGradients = ctx.gradients
        if gradients.are_waiting:
            gradients.note(work)
        else:
            work()
        grad_x = grad @ ctx.weight if ctx.needs_input_grad[0] else None
        return grad_x, rows.sum(0) if ctx.needs_input_grad[1] else None, None, None, None


@torch.no_grad()
def _add_gradient(weight: Tensor, grad_rows: Tensor, rows: Tensor) -> None:
    """Compute ``grad_rowsᵀ·rows`` and let autograd accumulate it."""
    torch.autograd.backward(weight, transposed_times(grad_rows, rows).contiguous())
