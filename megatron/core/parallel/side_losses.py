"""Side losses and statistics that layers report, such as a router's balancing loss and tokens per expert, by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from typing_extensions import override

from megatron.core.parallel.collectives import all_reduce
from megatron.core.parallel.context import ParallelContext


@runtime_checkable
class UpdatedFromCounts(Protocol):
    """A module that adjusts itself by what it counts in a step; it reports numbers under ``metric_name`` to
    ``SideLosses.add_metric`` in each forward pass.
    """

    metric_name: str

    def update_from_counts(self, counts: Tensor) -> None:
        """Adjust itself by the counts of the whole global batch, after the step's update and before the next pass."""
        ...


def updated_from_counts(models: Iterable[nn.Module]) -> tuple[UpdatedFromCounts, ...]:
    """The modules that adjust themselves by a step's counts, not by a gradient."""
    found = list[UpdatedFromCounts]()
    for module in chain.from_iterable(model.modules() for model in models):
        if hasattr(type(module), "update_from_counts"):
            title = type(module).__name__
            assert isinstance(module, UpdatedFromCounts), f"{title} updates itself from counts but has no metric_name"
            found.append(module)
    return tuple(found)


def update_from_layer_metrics(modules: Iterable[UpdatedFromCounts], layer_metrics: Mapping[str, Tensor]) -> None:
    """Let each of the modules adjust itself by what it reported in a step."""
    for module in modules:
        title, name = type(module).__name__, module.metric_name
        assert name in layer_metrics, f"{title} reported nothing as {name}: call add_metric in its forward"
        module.update_from_counts(layer_metrics[name])


class SideLosses:
    """Side losses of one microbatch on one rank, whatever part of the model it holds.

    ``backward_scale``: the gradient from which the microbatch's backward pass starts. ``weights``: by name, the factor
    that makes a loss a mean over its own count when all gradients are divided by the main loss's count.
    """

    def __init__(self, *, backward_scale: float = 1.0, weights: Mapping[str, Tensor] | None = None) -> None:
        self._scale, self._weights = backward_scale, weights or {}
        self._totals: dict[str, Tensor] = {}
        self._metrics: dict[str, Tensor] = {}

    def add(
        self,
        hidden: Tensor,
        name: str,
        total: Tensor,
        count: float | Tensor,
        *,
        context: ParallelContext,
        coefficient: float = 1.0,
    ) -> Tensor:
        """Returns ``hidden``, whose backward pass also runs that of ``coefficient`` times the loss.

        ``total``: the loss summed over the ``count`` tokens that this rank has outside the tensor-parallel regions,
        those of padding not among them.
        Gradients of layers that share a name are added; the mean over them is reported. A detached ``total`` is a
        statistic without a gradient. With sequence parallelism a small collective of the tensor-parallel ranks.
        """
        total = total.to(torch.promote_types(total.dtype, torch.float32))  # fp16 and bf16 can't count tokens
        value = sum_and_count(total, count)
        if context.splits_sequence:
            value = all_reduce(value, context.mesh, "tp")
        self._totals[name] = self._totals[name] + value if name in self._totals else value
        if not torch.is_grad_enabled():
            return hidden
        scale = coefficient * self._scale * self._weights.get(name, torch.ones((), device=total.device))
        return _WithLoss.apply(hidden, total, scale)  # type: ignore[no-untyped-call, no-any-return]

    def add_metric(self, name: str, numbers: Tensor, *, context: ParallelContext) -> None:
        """Add numbers without a gradient, such as how often tokens did each of several things: of the tokens that this
        rank has outside the tensor-parallel regions. They are added over the ranks that hold different tokens; of those
        that hold the same, one reports.
        """
        reports = context.splits_sequence or context.mesh.rank("tp") == 0
        numbers = numbers.detach() if reports else torch.zeros_like(numbers)
        self._metrics[name] = self._metrics[name] + numbers if name in self._metrics else numbers

    def take(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What was reported since the last call, by name: losses as ``[sum, count]``, and layer metrics."""
        found, self._totals, self._metrics = (self._totals, self._metrics), {}, {}
        return found


def sum_and_count(total: Tensor, count: float | Tensor) -> Tensor:
    """Sum and count in one tensor [2] of the type of ``total``, without a gradient."""
    total = total.detach()
    return torch.stack((total, count.to(total.dtype) if isinstance(count, Tensor) else torch.full_like(total, count)))


class _WithLoss(torch.autograd.Function):
    """The first argument, whose gradient starts that of the second."""

    @staticmethod
    @override
    def forward(ctx: Any, hidden: Tensor, total: Tensor, scale: Tensor) -> Tensor:
        ctx.scale = scale.to(total.dtype)
        return hidden.view_as(hidden)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, ctx.scale, None
