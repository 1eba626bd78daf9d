"""The two levels in which ranks that have the same parameters divide and copy what they keep of them (hybrid sharding).

Neighbouring ranks form a copy and divide it: gradients are summed among them into shards, and weights gathered. Then
each shard is summed over the copies, once a step: a slow network between nodes carries a shard in place of a model.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron.core.parallel.collectives import (
    Chain,
    Handle,
    all_gather_into_async,
    all_reduce_async,
    reduce_scatter_in_fp32_async,
    reduce_scatter_into_async,
)
from megatron.core.parallel.grid import Axis
from megatron.core.parallel.mesh import Mesh


@dataclass(frozen=True)
class Levels:
    """A rank's place in both levels, with the axes of each.

    ``num_shards``: ranks of a copy, the parts into which it is divided. ``own_shard``: the number of this rank's part.
    ``num_copies``: copies of each shard. ``own_copy``: the number of this rank's. ``divides_state``: optimizer state is
    divided over the copies as well, so that a rank updates its portion of a shard.
    """

    inner: tuple[Axis, ...] = ()
    outer: tuple[Axis, ...] = ()
    num_shards: int = 1
    own_shard: int = 0
    num_copies: int = 1
    own_copy: int = 0
    divides_state: bool = False

    @property
    def num_ranks(self) -> int:
        """All ranks with the same parameters, over which gradients are summed."""
        return self.num_shards * self.num_copies

    def start_sum(self, shard: Tensor, mesh: Mesh, *, in_fp32: bool) -> Handle[Tensor]:
        """Start to sum a shard over its copies in place; where state is divided, only this rank's portion of it.

        ``in_fp32``: see ``reduce_scatter_in_fp32_async``.
        """
        narrow = in_fp32 and shard.dtype.itemsize < 4
        portion = self.portion_of(shard)
        if narrow or self.divides_state:
            start = reduce_scatter_in_fp32_async if narrow else reduce_scatter_into_async
            summed = start(portion, shard, mesh, *self.outer)
            return summed if self.divides_state else Chain(summed, lambda: self.start_gather(shard, mesh))
        return all_reduce_async(shard, mesh, *self.outer)

    def start_gather(self, shard: Tensor, mesh: Mesh) -> Handle[Tensor]:
        """Start to gather a shard from the portions of its copies, in place."""
        return all_gather_into_async(shard, self.portion_of(shard), mesh, *self.outer)

    def portion_of(self, shard: Tensor) -> Tensor:
        """This rank's portion of a shard, 1-D."""
        return shard.view(self.num_copies, -1)[self.own_copy]


def levels_of(mesh: Mesh, reduce: tuple[Axis, ...], *, divides_state: bool = False) -> Levels:
    """The levels of a rank of ``mesh`` for parameters whose gradients are summed over the axes ``reduce``."""
    inner, outer = mesh.levels(reduce)
    return Levels(
        inner=inner,
        outer=outer,
        num_shards=mesh.size(*inner),
        own_shard=mesh.rank(*inner),
        num_copies=mesh.size(*outer),
        own_copy=mesh.rank(*outer),
        divides_state=divides_state and mesh.size(*outer) > 1,
    )
