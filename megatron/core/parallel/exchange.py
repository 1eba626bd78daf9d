"""Exchanges among an ordered list of ranks: parts to every one of them, or round a ring while something else runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.parallel.grid import Axis
from megatron.core.parallel.mesh import Mesh

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Team:
    """Ranks that work on something together, in order, this rank among them: those of some axes, or part of them."""

    mesh: Mesh
    members: tuple[int, ...]

    @classmethod
    def of(cls, mesh: Mesh, *axes: Axis) -> Team:
        """The ranks over ``axes``."""
        return cls(mesh, mesh.members(*axes))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.members)

    @property
    def rank(self) -> int:
        """This rank's position."""
        return self.members.index(self.mesh.world_rank)

    @property
    def group(self) -> ProcessGroup | None:
        """Their process group; None for one rank."""
        return self.mesh.group_of(self.members)

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Entered while this rank waits for the others in ``what``."""
        return self.mesh.activity.waiting(what, self.members)

    def neighbours(self, size: int) -> Team:
        """The run of ``size`` ranks this rank belongs to, when the team is cut into such runs."""
        start = self.rank // size * size
        return Team(self.mesh, self.members[start : start + size])

    def counterparts(self, size: int) -> Team:
        """The ranks in this rank's position of each run of ``size`` ranks."""
        return Team(self.mesh, self.members[self.rank % size :: size])


class Shift:
    """A tensor on its way to the next rank of a ring, and the previous rank's on its way here.

    ``tag`` keeps rings apart that turn at the same time; both ends start their shifts in the same order. ``x`` stays
    untouched until ``wait``. ``into``: where to receive, instead of in a new tensor.
    """

    def __init__(self, x: Tensor, team: Team, *, tag: int = 0, into: Tensor | None = None) -> None:
        assert x.is_contiguous(), "what is sent lies in one piece"
        self._team, self._sent = team, x
        self._received = torch.empty_like(x) if into is None else into
        after, before = team.members[(team.rank + 1) % team.size], team.members[team.rank - 1]
        self._works: Sequence[dist.Work] = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, after, team.group, tag),
                dist.P2POp(dist.irecv, self._received, before, team.group, tag),
            ]
        )

    def wait(self) -> Tensor:
        """What the previous rank sent."""
        with self._team.waiting("ring exchange"):
            for work in self._works:
                work.wait()
        return self._received


def circulate(x: Tensor, team: Team) -> Iterator[tuple[int, Tensor]]:
    """Every rank's ``x`` with its position in the team: this rank's own, then from the one before it to the one after.

    The next one travels while the one that was yielded is used, so a rank holds two, and no more: each arrives where
    the one before last was. That goes for the first one, too, which is given away.
    """
    spare: Tensor | None = None
    for step in range(team.size):
        shift = Shift(x, team, into=spare) if step + 1 < team.size else None
        yield (team.rank - step) % team.size, x
        if shift is not None:
            x, spare = shift.wait(), x


def all_to_all(x: Tensor, team: Team) -> Tensor:
    """Part *i* of ``x`` along dim 0 goes to rank *i*; what comes from rank *i* is part *i* of the result."""
    group = team.group
    if group is None:
        return x
    assert x.shape[0] % team.size == 0, f"{x.shape[0]} rows are not divisible by {team.size} ranks"
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    with team.waiting("all-to-all"):
        dist.all_to_all_single(out, x.contiguous(), group=group)
    return out
