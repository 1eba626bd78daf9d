"""Two ways in which a rank gets at every other rank's keys and values, and their gradients get back to their owners.

``Ring`` passes them on from rank to rank while attention to those at hand is computed (Liu et al. 2023,
arXiv:2310.01889): two ranks' keys are held at a time. ``Gather`` fetches all at once (Llama 3, arXiv:2407.21783), while
a rank attends to its own: one message instead of many, and memory for the keys of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from megatron.core.parallel.collectives import all_gather_into_async, reduce_scatter
from megatron.core.parallel.exchange import Shift, Team, circulate
from megatron.core.parallel.mesh import Mesh

_GRADIENTS = 1  # tag of the ring that turns beside that of the keys


class Returning(Protocol):
    """Collects what a rank contributes to the gradients of each rank's keys."""

    def add(self, owner: int, grads: Tensor) -> None:
        """Take in the contribution to those of ``owner``, in the order in which keys came; ``grads`` is given away."""
        ...

    def own(self) -> Tensor:
        """The sum of all ranks' contributions to this rank's keys."""
        ...


class KeyExchange(Protocol):
    """Moves packed keys and values among the ranks of ``team``."""

    team: Team

    def visit(self, packed: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Every rank's packed keys and values with the rank's position in the team, this rank's own first.

        Each may be overwritten when the next is asked for, ``packed`` as well.
        """
        ...

    def returning(self, packed: Tensor) -> Returning:
        """Where gradients shaped like ``packed`` are collected."""
        ...


class Ring:
    """From each rank to the next."""

    def __init__(self, team: Team) -> None:
        self.team = team

    def visit(self, packed: Tensor) -> Iterator[tuple[int, Tensor]]:
        """See ``KeyExchange``."""
        return circulate(packed, self.team)

    def returning(self, packed: Tensor) -> Returning:
        """See ``KeyExchange``."""
        return _RingReturning(self.team)


class _RingReturning:
    """A sum of gradients follows its keys round the ring, one step behind, to where it started without its owner's."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._own: Tensor | None = None
        self._shift: Shift | None = None

    def add(self, owner: int, grads: Tensor) -> None:
        if self._own is None:  # a rank visits its own keys first
            self._own = grads
            return
        if self._shift is not None:
            grads += self._shift.wait()
        self._shift = Shift(grads, self._team, tag=_GRADIENTS)

    def own(self) -> Tensor:
        assert self._own is not None and self._shift is not None, "a ring has more than one rank"
        return self._own.add_(self._shift.wait())


class Gather:
    """From all ranks of the axis ``cp`` at once."""

    def __init__(self, mesh: Mesh) -> None:
        self.team = Team.of(mesh, "cp")

    def visit(self, packed: Tensor) -> Iterator[tuple[int, Tensor]]:
        """See ``KeyExchange``."""
        ranks, rank = self.team.size, self.team.rank
        everyone = packed.new_empty(ranks * packed.numel())
        gathering = all_gather_into_async(everyone, packed, self.team.mesh, "cp")
        yield rank, packed
        parts = gathering.wait().view(ranks, -1)
        for step in range(1, ranks):
            owner = (rank - step) % ranks
            yield owner, parts[owner]

    def returning(self, packed: Tensor) -> Returning:
        """See ``KeyExchange``."""
        return _GatherReturning(packed, self.team)


class _GatherReturning:
    """The transpose of a gather: sums, scattered."""

    def __init__(self, packed: Tensor, team: Team) -> None:
        self._team = team
        self._sums = torch.zeros(team.size, *packed.shape, dtype=packed.dtype, device=packed.device)

    def add(self, owner: int, grads: Tensor) -> None:
        self._sums[owner].copy_(grads)

    def own(self) -> Tensor:
        return reduce_scatter(self._sums, self._team.mesh, "cp").squeeze(0)
