"""A part of a model for the runner: it turns stage inputs and a microbatch into the next stage's inputs or a loss."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from megatron.core.parallel.rng import StreamKey
from megatron.core.parallel.side_losses import SideLosses

StageInputs = dict[str, Tensor]
"""Outputs of a stage that are inputs of the next: tensors by name. Those of floating type have gradients, but for those
whose name begins with ``CONSTANT``.
"""

CONSTANT = "constant "
"""How the names of stage inputs begin whose values don't depend on what is trained."""


def has_gradient(name: str, tensor: Tensor) -> bool:
    """Whether the gradient of a stage input is sent back."""
    return tensor.is_floating_point() and not name.startswith(CONSTANT)


@dataclass(frozen=True)
class TensorSpec:
    """Shape and type of a stage input, known before it is received."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """Shape and type of ``tensor``."""
        return cls(tuple(tensor.shape), tensor.dtype)

    def empty(self, device: torch.device) -> Tensor:
        """An uninitialized tensor."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class Microbatch:
    """Tensors by field name, and the random streams of the samples they hold.

    ``backward_scale``: the gradient from which the backward pass of its loss starts; with fp16 from the loss scale.
    ``loss_weights``: of several losses; see ``LossSum.of``.
    """

    tensors: Mapping[str, Tensor]
    rng_key: StreamKey
    backward_scale: float = 1.0
    loss_weights: Mapping[str, Tensor] = field(default_factory=dict)

    @functools.cached_property
    def side_losses(self) -> SideLosses:
        """Collects the losses that layers report, in all of this rank's parts of the model."""
        return SideLosses(backward_scale=self.backward_scale, weights=self.loss_weights)


@dataclass(frozen=True)
class LossSum:
    """A loss as a sum and a count, never a mean: independent of how tokens are divided into microbatches and ranks.

    ``sum``: fp32 scalar whose gradient is accumulated. ``count``: fp32 scalar by which the sum is divided in the end.
    ``parts``: named losses to report, each a ``[sum, count]`` pair. ``layer_metrics``: named counts of what layers did.
    """

    sum: Tensor
    count: Tensor
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    layer_metrics: Mapping[str, Tensor] = field(default_factory=dict)

    def detached(self) -> LossSum:
        """The sums without their autograd graph."""
        parts = {name: part.detach() for name, part in self.parts.items()}
        return LossSum(self.sum.detach(), self.count.detach(), parts, self.layer_metrics)

    def plus(self, other: LossSum) -> LossSum:
        """Sums and counts of both, and of the parts and layer metrics of either."""
        parts, layer_metrics = _added(self.parts, other.parts), _added(self.layer_metrics, other.layer_metrics)
        return LossSum(self.sum + other.sum, self.count + other.count, parts, layer_metrics)

    @classmethod
    def reported(
        cls, parts: Mapping[str, Tensor], layer_metrics: Mapping[str, Tensor], *, device: torch.device
    ) -> LossSum:
        """Parts, ``[sum, count]`` each, and layer metrics, reported only: the loss and its gradient are zero."""
        nothing = torch.zeros((), device=device)
        return cls(nothing, nothing, parts, layer_metrics)

    @classmethod
    def of(
        cls,
        parts: Mapping[str, tuple[Tensor, Tensor]],
        *,
        weights: Mapping[str, Tensor] | None = None,
        coefficients: Mapping[str, float] = MappingProxyType({}),
    ) -> LossSum:
        """Losses by name, each a sum and a count. All sums are divided by the first count; ``weights`` multiply the
        sums: quotients of the global counts make each a mean over its own count. ``coefficients``: of losses, 1 unless
        given; what is reported is without them.
        """
        _, count = next(iter(parts.values()))
        scaled = [
            total * coefficients.get(name, 1.0) * (weights[name] if weights else 1.0)
            for name, (total, _) in parts.items()
        ]
        reported = {
            name: torch.stack((total.detach(), number.detach().to(total.dtype)))
            for name, (total, number) in parts.items()
        }
        return cls(functools.reduce(torch.add, scaled), count, reported)

    @classmethod
    def single(cls, name: str, total: Tensor, count: Tensor) -> LossSum:
        """A loss with one reported part: itself."""
        return cls.of({name: (total, count)})


def _added(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = dict(some)
    for name, other in others.items():
        found[name] = found[name] + other if name in found else other
    return found


class Chunk(Protocol):
    """A part of consecutive layers of the model that this rank holds."""

    @property
    def incoming(self) -> Mapping[str, TensorSpec]:
        """The chunk's stage inputs, equal for every microbatch; none for the first stage."""
        ...

    def __call__(self, stage_inputs: StageInputs, microbatch: Microbatch) -> StageInputs | LossSum:
        """Returns the inputs of the next stage, or, on the last stage, the loss."""
        ...
