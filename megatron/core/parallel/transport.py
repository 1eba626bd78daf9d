"""Point-to-point messages between pipeline stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.parallel.collectives import Handle
from megatron.core.parallel.mesh import Mesh

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Transport:
    """Messages between the ranks of this rank's pipeline, numbered by their place on the axis ``pp``.

    A pair of ranks has two channels, one for each direction. Messages of a channel arrive in the order in which they
    were sent, so they need no tags. NCCL runs the operations of a communicator one after the other: with a single
    channel, a receive that is started early would block a send that the other rank is waiting for.
    """

    def __init__(self, mesh: Mesh, device: torch.device, *, routes: Iterable[tuple[int, int]] = ()) -> None:
        """Make the channels. ``routes``: the (source, target) pairs of the pipeline, the same on all of its ranks.

        Each is used once now, in order: NCCL connects at the first message, which waits for the other rank.
        """
        self._members, self._rank, self._activity = mesh.members("pp"), mesh.rank("pp"), mesh.activity
        ascending = mesh.group("pp")
        self._channels: dict[bool, ProcessGroup | None] = {True: ascending, False: ascending}
        if device.type != "cpu":  # gloo itself keeps the two directions apart
            self._channels[False] = dist.new_group(
                list(self._members), timeout=mesh.timeout, use_local_synchronization=True
            )
        for source, target in sorted(set(routes)):
            greeting = [torch.zeros(1, device=device)]
            if self._rank == source:
                self.send(greeting, target).wait()
            elif self._rank == target:
                self.receive(greeting, source).wait()

    def send(self, tensors: Sequence[Tensor], target: int) -> Handle[Sequence[Tensor]]:
        """Start sending ``tensors``, one after the other."""
        channel, peer = self._channels[self._rank < target], self._members[target]
        whole = [tensor.contiguous() for tensor in tensors]
        waiting = self._activity.waiting(f"a send to pipeline rank {target}", self._pair(target))
        return Handle(whole, [dist.isend(tensor, peer, group=channel) for tensor in whole], waiting)

    def receive(self, buffers: Sequence[Tensor], source: int) -> Handle[Sequence[Tensor]]:
        """Start receiving into ``buffers``, which have the shapes and types of what was sent."""
        channel, peer = self._channels[source < self._rank], self._members[source]
        waiting = self._activity.waiting(f"a receive from pipeline rank {source}", self._pair(source))
        return Handle(buffers, [dist.irecv(buffer, peer, group=channel) for buffer in buffers], waiting)

    def _pair(self, other: int) -> tuple[int, ...]:
        return tuple(sorted((self._members[self._rank], self._members[other])))
