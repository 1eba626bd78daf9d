"""Two ways to exchange keys and values among context-parallel ranks, and to return their gradients to the owners.

``Ring`` sends them from rank to rank while attention to the present ones is computed (Liu et al. 2023,
arXiv:2310.01889): a rank holds two ranks' keys at a time. ``Gather`` gathers all at once (Llama 3, arXiv:2407.21783),
while a rank attends to its own: one message instead of many, and memory for the keys of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from megatron.core.parallel.collectives import Handle, all_gather_into_async, reduce_scatter
from megatron.core.parallel.exchange import RankGroup, circulate, shift

_GRADIENTS = 1  # tag of the ring of gradients, which runs beside that of the keys


@dataclass(frozen=True)
class Ring:
    """Pass keys and values round a ring, from each rank to the next. ``peers``: the ranks that hold the sequence
    together.
    """

    peers: RankGroup

    def visit(self, packed: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Every rank's packed keys and values with the rank's position in the group, this rank's own first.

        Each may be overwritten when the next is asked for, ``packed`` as well.
        """
        return circulate(packed, self.peers)

    def sum_at_owner(self, contributions: Iterator[tuple[int, Tensor]]) -> Tensor:
        """The sum of all ranks' gradients of this rank's packed keys and values.

        ``contributions``: what this rank adds to the gradients of each owner's, in the order of ``visit``; the tensors
        may be overwritten. Sums follow their keys round the ring one step later and end at the owner, which adds its
        own part last.
        """
        _, own = next(contributions)
        coming: Handle[Tensor] | None = None
        for _, grads in contributions:
            if coming is not None:
                grads += coming.wait()
            coming = shift(grads, self.peers, tag=_GRADIENTS)
        assert coming is not None, "a ring has more than one rank"
        return own.add_(coming.wait())


@dataclass(frozen=True)
class Gather:
    """Gather keys and values from all ranks of the axis ``cp``, which are ``peers``, at once."""

    peers: RankGroup

    def visit(self, packed: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Every rank's packed keys and values with the rank's position in the group, this rank's own first."""
        ranks, rank = self.peers.size, self.peers.rank
        everyone = packed.new_empty(ranks * packed.numel())
        gathering = all_gather_into_async(everyone, packed, self.peers.mesh, "cp")
        yield rank, packed
        parts = gathering.wait().view(ranks, -1)
        for step in range(1, ranks):
            owner = (rank - step) % ranks
            yield owner, parts[owner]

    def sum_at_owner(self, contributions: Iterator[tuple[int, Tensor]]) -> Tensor:
        """The transpose of a gather: a reduce-scatter."""
        rank, own = next(contributions)
        by_owner = own.new_empty(self.peers.size, *own.shape)
        by_owner[rank] = own
        del own
        for owner, grads in contributions:
            by_owner[owner] = grads
            del grads  # before the next one is computed
        return reduce_scatter(by_owner, self.peers.mesh, "cp").squeeze(0)


KeyExchange = Ring | Gather
