"""A part of a model as the runner sees it: stage inputs and a microbatch become the next stage's inputs, or a loss."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from megatron.core.parallel.rng import StreamKey
from megatron.core.parallel.side_losses import SideLosses

StageInputs = dict[str, Tensor]
"""What one stage hands the next: tensors by name. Those of floating type carry gradients back."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape and type of a tensor that a stage is handed, known before it arrives."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """Those of ``tensor``."""
        return cls(tuple(tensor.shape), tensor.dtype)

    def empty(self, device: torch.device) -> Tensor:
        """Room for such a tensor."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class Microbatch:
    """Tensors by field name, and the random streams of the samples they hold.

    ``backward_scale``: from which the backward pass of its loss starts; the loss scale, with fp16. ``loss_weights``: of
    several losses; see ``LossSum.of``.
    """

    tensors: Mapping[str, Tensor]
    rng_key: StreamKey
    backward_scale: float = 1.0
    loss_weights: Mapping[str, Tensor] = field(default_factory=dict)

    @functools.cached_property
    def side_losses(self) -> SideLosses:
        """Takes the losses that layers report; one for all of this rank's parts of the model."""
        return SideLosses(backward_scale=self.backward_scale, weights=self.loss_weights)


@dataclass(frozen=True)
class LossSum:
    """A loss as a sum and a count, never a mean: it can't depend on how tokens fall into microbatches or ranks.

    ``sum``: fp32 scalar whose gradient is accumulated. ``count``: fp32 scalar, what the sum is divided by in the end.
    ``parts``: named losses to report, each a ``[sum, count]`` pair.
    """

    sum: Tensor
    count: Tensor
    parts: Mapping[str, Tensor] = field(default_factory=dict)

    def detached(self) -> LossSum:
        """The same numbers without the graph behind them."""
        return LossSum(
            self.sum.detach(), self.count.detach(), {name: part.detach() for name, part in self.parts.items()}
        )

    def plus(self, other: LossSum) -> LossSum:
        """Sums and counts of both, and of the parts that one of them has."""
        parts = dict(self.parts)
        for name, part in other.parts.items():
            parts[name] = parts[name] + part if name in parts else part
        return LossSum(self.sum + other.sum, self.count + other.count, parts)

    @classmethod
    def of_parts(cls, parts: Mapping[str, Tensor]) -> LossSum:
        """Parts to report, ``[sum, count]`` each, beside a loss whose gradient they are not in."""
        nothing = next(iter(parts.values())).new_zeros(())
        return cls(nothing, nothing, parts)

    @classmethod
    def of(cls, parts: Mapping[str, tuple[Tensor, Tensor]], *, weights: Mapping[str, Tensor] | None = None) -> LossSum:
        """Losses by name, each a sum and a count. The count of the first divides all; ``weights`` multiply the sums, so
        that with quotients of the global counts each becomes a mean over its own.
        """
        _, count = next(iter(parts.values()))
        scaled = [total * weights[name] if weights else total for name, (total, _) in parts.items()]
        reported = {
            name: torch.stack((total.detach(), number.detach().to(total.dtype)))
            for name, (total, number) in parts.items()
        }
        return cls(functools.reduce(torch.add, scaled), count, reported)

    @classmethod
    def single(cls, name: str, total: Tensor, count: Tensor) -> LossSum:
        """A loss with one reported part: itself."""
        return cls.of({name: (total, count)})


class Chunk(Protocol):
    """A consecutive part of the model that this rank holds."""

    @property
    def incoming(self) -> Mapping[str, TensorSpec]:
        """Its inputs for every microbatch; none for the first stage."""
        ...

    def __call__(self, stage_inputs: StageInputs, microbatch: Microbatch) -> StageInputs | LossSum:
        """Hand hidden states on to the next chunk, or, on the last, return the loss."""
        ...
