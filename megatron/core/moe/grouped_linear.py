"""The linear layers of experts: grouped products with gradients, of which those of weights may be left for later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from megatron.core.ops.grouped_matmul import Backend, Groups
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.operands import Grouping
from megatron.core.parallel.recompute import will_be_recomputed
from megatron.core.parallel.weight_gradients import Work


class Activation(Protocol):
    """What is between the two layers of an expert."""

    def __call__(self, inner: Tensor) -> Tensor:
        """The activation of the first layer's result ``inner`` [n, …]: [n, f]."""
        ...

    def gradients(self, grad: Tensor, inner: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of ``inner`` and of ``scales`` [n, 1], from that of ``scales`` times the result, ``grad``, which is
        overwritten.
        """
        ...


@dataclass
class GroupedLinear:
    """``f(x)·weightᵀ`` of each row's group: rows x [n, …], weight [e, …, in], where f(x) is [n, in]; the result is
    [n, out], with out the product of the weight's dimensions between.

    ``backend``: multiplies. ``context``: of the rank, whose schedule may leave the weight's gradient for later.
    ``sums``: gradients of weights so far, inside ``one_gradient``.
    """

    backend: Backend
    context: ModelContext
    sums: dict[Tensor, Tensor] | None = None

    def __call__(self, rows: Tensor, weight: Tensor, groups: Groups) -> Tensor:
        """The product of rows x [n, in] with f(x) = x. Without rows, too, the weight gets a gradient: zero."""
        if torch.is_grad_enabled() and weight.requires_grad and not rows.requires_grad:
            rows = rows.detach().requires_grad_()  # else there is no backward pass, as autograd doesn't see the weight
        rows = self.input(rows, weight, groups)
        return _Product.apply(rows, (weight,), self, groups)  # type: ignore[no-untyped-call, no-any-return]

    def of_activation(
        self,
        inner: Tensor,
        scales: Tensor,
        weight: Tensor,
        groups: Groups,
        *,
        activation: Activation,
        keeps_activation: bool,
    ) -> Tensor:
        """The product with f(x) = ``scales`` [n, 1] · ``activation`` of ``inner``. Kept are ``inner``, and f(x) if
        ``keeps_activation``; else it is computed again.
        """
        options = (activation, keeps_activation)
        return _ProductOfActivation.apply(inner, scales, (weight,), self, groups, options)  # type: ignore[no-untyped-call, no-any-return]

    def input(self, rows: Tensor, weight: Tensor, groups: Groups, scales: Tensor | None = None) -> Tensor:
        """What is multiplied in place of ``rows`` [n, in], which ``scales`` [n, 1] have multiplied."""
        if not self.context.replaces_operands:
            return rows
        return self.context.operands.rows(rows, weight, Grouping(groups.parts, scales))

    def matrices(self, weight: Tensor) -> Tensor:
        """What is multiplied in place of ``weight``, as [e, out, in]."""
        used = self.context.operands.weight(weight)() if self.context.replaces_operands else weight.detach()
        return used.flatten(1, -2)

    def multiply(self, rows: Tensor, weight: Tensor, groups: Groups) -> Tensor:
        """The product of each row with its group's weight."""
        products = self.context.products
        if products.multiply_experts is not None:
            found = products.multiply_experts(rows, weight, groups.parts)
            if found is not None:
                return found
        backend = self.backend.for_generation() if products.in_generation else self.backend
        return backend.multiply(rows, self.matrices(weight).transpose(1, 2), groups)

    def multiply_back(self, grad: Tensor, weight: Tensor, groups: Groups) -> Tensor:
        """The gradient of the rows."""
        return self.backend.multiply(grad, self.matrices(weight), groups)

    def outer(self, weight: Tensor, grad: Tensor, rows: Tensor, groups: Groups) -> Tensor:
        """The gradient of the weight, [e, out, in]."""
        return self.backend.outer(grad, rows, groups)

    def add_outer(self, total: Tensor, weight: Tensor, grad: Tensor, rows: Tensor, groups: Groups) -> None:
        """Add the gradient of the weight to ``total`` [e, out, in]."""
        self.backend.add_outer(total, grad, rows, groups)

    def add_gradient(
        self, weight: Tensor, grad: Tensor, rows: Callable[[], Tensor], groups: Groups, *, at_once: bool
    ) -> None:
        """Add the gradient of ``weight`` to its sum, if it has one, or let autograd accumulate it, ``at_once`` or when
        the schedule says.
        """
        if not weight.requires_grad:
            return
        main_grad = self.context.weight_gradients.main_grad_of(weight)
        if main_grad is not None and self.sums is None:

            def work() -> None:
                main_grad.opened()
                self.add_outer(main_grad.sum.flatten(1, -2), weight, grad, rows(), groups)
                main_grad.added()

            self._do(work, at_once=at_once)
            return

        def computed() -> Tensor:
            return self.outer(weight, grad, rows(), groups).view(weight.shape)

        if self.sums is None:
            self._accumulate(weight, computed, at_once=at_once)
        elif weight in self.sums:
            self.sums[weight] += computed()
        else:
            self.sums[weight] = computed()

    @contextmanager
    def one_gradient(self) -> Iterator[None]:
        """In the block, gradients of a weight are added up; at the end autograd accumulates the sum, as of one product:
        the synchronization of gradients counts them.
        """
        self.sums = {}
        yield
        sums, self.sums = self.sums, None
        for weight, total in sums.items():
            self._accumulate(weight, total.detach, at_once=False)

    def _accumulate(self, weight: Tensor, gradient: Callable[[], Tensor], *, at_once: bool) -> None:
        self._do(lambda: torch.autograd.backward(weight, gradient()), at_once=at_once)

    def _do(self, work: Work, *, at_once: bool) -> None:
        self.context.weight_gradients.do(torch.no_grad()(work), at_once=at_once)


class _Product(torch.autograd.Function):
    """y = x·Wᵀ;  dx = dy·W at once,  dW = dyᵀ·x at once or later, for each group.

    The weight's gradient is accumulated by ``add_gradient``, as that of ``tensor_parallel.linear``. The weight comes in
    a tuple, where autograd doesn't see it: else it calls the weight's hooks a second time, without a gradient.
    """

    @staticmethod
    @override
    def forward(ctx: Any, rows: Tensor, hidden: tuple[Tensor], linear: GroupedLinear, groups: Groups) -> Tensor:
        ctx.save_for_backward(rows)
        (weight,) = hidden
        ctx.weight, ctx.linear, ctx.groups = weight, linear, groups
        ctx.at_once = will_be_recomputed()
        return linear.multiply(rows, weight, groups)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (rows,), linear = ctx.saved_tensors, ctx.linear
        grad = grad.contiguous()
        linear.add_gradient(ctx.weight, grad, lambda: rows, ctx.groups, at_once=ctx.at_once)
        return linear.multiply_back(grad, ctx.weight, ctx.groups), None, None, None


class _ProductOfActivation(torch.autograd.Function):
    """y = (p·act(x))·Wᵀ;  with da = dy·W:  dp = Σ da·act(x),  dx = p·da·act'(x),  dW = dyᵀ·(p·act(x))."""

    @staticmethod
    @override
    def forward(
        ctx: Any,
        inner: Tensor,
        scales: Tensor,
        hidden: tuple[Tensor],
        linear: GroupedLinear,
        groups: Groups,
        options: tuple[Activation, bool],
    ) -> Tensor:
        (weight,), (ctx.activation, keeps_activation) = hidden, options
        rows = linear.input(ctx.activation(inner).mul_(scales), weight, groups, scales)
        ctx.save_for_backward(inner, scales, *((rows,) if keeps_activation else ()))
        ctx.weight, ctx.linear, ctx.groups = weight, linear, groups
        ctx.at_once = will_be_recomputed()
        return linear.multiply(rows, weight, groups)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (inner, scales, *kept), linear = ctx.saved_tensors, ctx.linear
        grad = grad.contiguous()
        grad_rows = linear.multiply_back(grad, ctx.weight, ctx.groups)
        if kept:
            (rows,) = kept
        else:
            rows = linear.input(ctx.activation(inner).mul_(scales), ctx.weight, ctx.groups, scales)
        linear.add_gradient(ctx.weight, grad, lambda: rows, ctx.groups, at_once=ctx.at_once)
        return *ctx.activation.gradients(grad_rows, inner, scales), None, None, None, None


def rows_of_groups(values: Tensor, groups: Groups, *, rows: int) -> Tensor:
    """The value [e, …] of each row's group: [n, …]. Its gradient is summed in the order of the rows."""
    return _RowsOfGroups.apply(values, groups, rows)  # type: ignore[no-untyped-call, no-any-return]


class _RowsOfGroups(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, values: Tensor, groups: Groups, rows: int) -> Tensor:
        ctx.groups = groups
        return values.repeat_interleave(groups.counts, dim=0, output_size=rows)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return torch.stack([part.sum(0) for part in ctx.groups.parts(grad)]), None, None
