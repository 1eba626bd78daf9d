"""Scales of FP8 tensors that earlier iterations have set: recipe "delayed"."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron.config.fp8 import Fp8Config
from megatron.core.ops.quantize import LARGEST
from megatron.core.parallel.collectives import all_reduce
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.sharding import ShardedState, Sharding


class DelayedScaling:
    """Scale and history of largest values of each role (input, weight, gradient of the output) of a rank's layers.

    Scales change at the end of a step, when the ranks of a stage have agreed on the largest values of the step; so all
    its microbatches are scaled alike, and a run's numbers don't depend on which rank had which of them. The history
    begins with those of the running step (Transformer Engine's layout). ``roles``: their names and formats.
    """

    def __init__(self, roles: Sequence[tuple[str, torch.dtype]], settings: Fp8Config, context: ParallelContext) -> None:
        self._context, self._margin = context, settings.fp8_margin
        self._takes_max = settings.fp8_amax_compute_algo == "max"
        self._names = [name for name, _ in roles]
        limits = [LARGEST[fmt] for _, fmt in roles]
        self._limits = torch.tensor(limits, dtype=torch.float32, device=context.device)
        self._scales = torch.ones_like(self._limits)
        self._history = self._limits.new_zeros(len(roles), settings.fp8_amax_history_len)

    def scale(self, number: int) -> Tensor:
        """What the tensor of a role is multiplied by, fp32 []."""
        return self._scales[number]

    def observe(self, number: int, largest: Tensor) -> None:
        """Note the largest magnitude of a tensor, fp32 [], before scaling."""
        self._history[number, 0] = torch.maximum(self._history[number, 0], largest)

    def update(self) -> None:
        """Agree on the step's largest values and set the scales of the next. A collective of a stage's ranks.

        A role whose largest value is 0, infinite or NaN, on any rank, keeps its scale and history. Else the infinite
        gradients of a step that --fp16 skips would stop its scale for as long as they are in the history.
        """
        history, scales = self._history, self._scales
        local = torch.where(history[:, 0].isnan(), torch.inf, history[:, 0])  # NCCL promises no maximum of NaN
        seen = all_reduce(local, self._context.mesh, "tp", "cp", "dp", op="max")
        seen = torch.where(seen.isinf(), 0.0, seen)
        history[:, 0] = seen
        largest = history.amax(1) if self._takes_max else seen
        found = self._limits * 2.0**-self._margin / largest
        found = torch.where(found.isinf(), torch.full_like(found, torch.finfo(torch.float32).max), found)
        scales.copy_(torch.where(largest != 0, found, scales))
        history.copy_(torch.where(seen[:, None] == 0, history, history.roll(-1, 1)))
        history[:, 0] = 0.0

    def state(self) -> Iterator[ShardedState]:
        """``fp8.<role>.scale`` [1] and ``fp8.<role>.amax_history`` [len], the same on all ranks that hold a part of the
        layer.
        """
        for number, name in enumerate(self._names):
            yield ShardedState(f"fp8.{name}.scale", self._scales[number : number + 1], Sharding((1,)))
            history = self._history[number]
            yield ShardedState(f"fp8.{name}.amax_history", history, Sharding(tuple(history.shape)))
