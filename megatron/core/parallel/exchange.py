"""Exchanges among an ordered list of ranks: all-to-all, and round a ring while something else is computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.parallel.collectives import Handle
from megatron.core.parallel.grid import Axis
from megatron.core.parallel.mesh import Mesh

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class RankGroup:
    """An ordered list of ranks, this rank among them: those over some axes, or part of them."""

    mesh: Mesh
    members: tuple[int, ...]

    @classmethod
    def of(cls, mesh: Mesh, *axes: Axis) -> RankGroup:
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
        """The members' process group; None for one rank."""
        return self.mesh.group_of(self.members)

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Note in the block that this rank waits for the others in ``what``."""
        return self.mesh.activity.waiting(what, self.members)

    def neighbours(self, size: int) -> RankGroup:
        """The run of ``size`` ranks this rank belongs to, when the group is cut into such runs."""
        start = self.rank // size * size
        return RankGroup(self.mesh, self.members[start : start + size])

    def counterparts(self, size: int) -> RankGroup:
        """The ranks in this rank's position of each run of ``size`` ranks."""
        return RankGroup(self.mesh, self.members[self.rank % size :: size])


def shift(x: Tensor, peers: RankGroup, *, tag: int = 0, into: Tensor | None = None) -> Handle[Tensor]:
    """Start sending ``x`` to the next rank of a ring and receiving the previous rank's.

    ``tag`` keeps rings apart that run at the same time; both ends start their shifts in the same order. ``x`` must not
    be changed until ``wait``. ``into``: where to receive, instead of in a new tensor.
    """
    assert x.is_contiguous(), "what is sent must be contiguous"
    received = torch.empty_like(x) if into is None else into
    after, before = peers.members[(peers.rank + 1) % peers.size], peers.members[peers.rank - 1]
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, x, after, peers.group, tag),
            dist.P2POp(dist.irecv, received, before, peers.group, tag),
        ]
    )
    return Handle(received, works, peers.waiting("ring exchange"), sent=x)


def circulate(x: Tensor, peers: RankGroup) -> Iterator[tuple[int, Tensor]]:
    """Every rank's ``x`` with its position in the group: this rank's own first, then backwards round the ring.

    The next one travels while the yielded one is used. A rank holds two at a time: each is received in the memory of
    the one before last, so ``x`` itself is overwritten.
    """
    spare: Tensor | None = None
    for step in range(peers.size):
        coming = shift(x, peers, into=spare) if step + 1 < peers.size else None
        yield (peers.rank - step) % peers.size, x
        if coming is not None:
            x, spare = coming.wait(), x


def all_to_all(x: Tensor, peers: RankGroup) -> Tensor:
    """Send part *i* of ``x`` along dim 0 to rank *i*; part *i* of the result is from rank *i*."""
    group = peers.group
    if group is None:
        return x
    assert x.shape[0] % peers.size == 0, f"{x.shape[0]} rows are not divisible by {peers.size} ranks"
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    with peers.waiting("all-to-all"):
        dist.all_to_all_single(out, x.contiguous(), group=group)
    return out


def all_to_all_rows(x: Tensor, peers: RankGroup, sends: list[int], receives: list[int]) -> Tensor:
    """Send ``sends[i]`` rows of ``x``, in the order of ranks, to rank *i* and receive ``receives[i]``."""
    return start_all_to_all_rows(x, peers, sends, receives).wait()


def start_all_to_all_rows(x: Tensor, peers: RankGroup, sends: list[int], receives: list[int]) -> Handle[Tensor]:
    """Begin ``all_to_all_rows``; ``x`` must not be changed until ``wait``."""
    x, out = x.contiguous(), x.new_empty(sum(receives), *x.shape[1:])
    work = dist.all_to_all_single(out, x, receives, sends, group=peers.group, async_op=True)
    return Handle(out, [work], peers.waiting("all-to-all"), sent=x)
