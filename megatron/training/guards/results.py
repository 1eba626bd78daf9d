"""Fingerprints of a step's results on each rank, and which ranks got another result from the same inputs."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.device import is_gpu
from megatron.core.distributed.buffers import FlatBuffer, parts_of
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.sharding import ShardedState
from megatron.training.step import BatchSums, StepNumbers

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types of whole numbers in which bits are looked at, by their bytes."""


def checksum(x: Tensor) -> Tensor:
    """Sum of the bits of ``x`` as whole numbers, int64 [] on its device: any single flipped bit changes it."""
    return x.detach().reshape(-1).view(WORDS[x.element_size()]).sum(dtype=torch.int64)


@dataclass(frozen=True)
class Fingerprint:
    """A rank's results of a step. ``own``: sum and count of its own loss, if it has one. ``gradients``: checksum of the
    gradients that it updates weights by. ``values``: loss and gradient norm of the step.
    """

    own: tuple[float, ...]
    gradients: int
    values: tuple[float, ...]

    @classmethod
    def of(cls, sums: BatchSums, numbers: StepNumbers, buffers: Sequence[FlatBuffer]) -> Fingerprint:
        """The fingerprint of results which ``forward_backward`` has just left in ``buffers``."""
        parts = [checksum(buffer.own_grads(span)) for buffer, _, span in parts_of(buffers, FlatBuffer.owned)]
        total = int(torch.stack(parts).sum().item()) if parts else 0
        loss, *_ = numbers.loss.means.values()
        return cls(tuple(sums.own.double().tolist()), total, (loss, numbers.grad_norm))

    def distance(self, other: Fingerprint) -> float:
        """The largest relative difference between loss or gradient norm; 0 for equal ones, NaN included."""
        return distance(self.values, other.values)


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest relative difference between numbers; infinite between a finite one and another that is not."""
    found = [0.0]
    for a, b in zip(one, other):
        if a == b or (math.isnan(a) and math.isnan(b)):
            continue
        is_finite = math.isfinite(a) and math.isfinite(b)
        found.append(abs(a - b) / max(abs(a), abs(b)) if is_finite else math.inf)
    return max(found)


def differing(before: Sequence[Fingerprint], after: Sequence[Fingerprint], *, tolerance: float) -> list[int]:
    """The ranks whose results differ: those whose own loss does, or else those whose gradients do, or else, where only
    sums over ranks differ, all. ``tolerance``: relative difference of losses and norms of devices whose sums have no
    fixed order; with 0 bits are compared.
    """
    pairs = [*enumerate(zip(before, after))]
    found = [rank for rank, (one, other) in pairs if distance(one.own, other.own) > tolerance]
    if not found and tolerance == 0.0:
        found = [rank for rank, (one, other) in pairs if one.gradients != other.gradients]
    return found or [rank for rank, (one, other) in pairs if one.distance(other) > tolerance]


def place_of(context: ParallelContext) -> str:
    """The host and device of this rank, such as ``n17 cuda:3``."""
    device = context.device
    return f"{socket.gethostname()} {device}" if is_gpu(device) else socket.gethostname()


class Kept:
    """A copy of the state that a forward pass changes, to compute the same pass again."""

    def __init__(self, state: Iterable[ShardedState]) -> None:
        self._pairs = [(each.tensor, each.tensor.detach().clone()) for each in state]

    def restore(self) -> None:
        """Make the state what it was."""
        with torch.no_grad():
            for tensor, copy in self._pairs:
                tensor.copy_(copy)
