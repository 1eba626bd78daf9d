"""Bytes from rank to rank over the hosts' network, beside all communication of training and independent of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.parallel.mesh import Mesh

_TIMEOUT = timedelta(minutes=10)


class ByteLinks:
    """Links between the ranks of ``members``. Making one is a collective of these; a background thread may use it.

    ``name``: the same on all members, and used once in a start of the run.
    """

    def __init__(self, mesh: Mesh, members: Sequence[int], *, name: str) -> None:
        self._places = {rank: place for place, rank in enumerate(members)}
        self._rank, self._mesh = mesh.world_rank, mesh
        prefix = f"bytes/{name}/{members[0]}"
        store = dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]
        self._group: Any = dist.ProcessGroupGloo(
            store, self._places[mesh.world_rank], len(members), mesh.timeout or _TIMEOUT
        )

    def exchange(self, given: Mapping[int, Tensor], lengths: Mapping[int, int]) -> dict[int, Tensor]:
        """Send bytes to ranks and receive ``lengths`` of them from ranks, at the same time; what was received, by rank.

        Raises ConnectionError when a rank is gone.
        """
        received = {rank: torch.empty(length, dtype=torch.uint8) for rank, length in lengths.items() if length}
        try:
            works: list[Any] = [
                self._group.send([data], self._places[rank], 0) for rank, data in given.items() if data.numel()
            ]
            works += [self._group.recv([data], self._places[rank], 0) for rank, data in received.items()]
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise ConnectionResetError(f"a rank that holds copies is gone ({str(error).splitlines()[0]})") from error
        empty = torch.empty(0, dtype=torch.uint8)
        return {rank: received.get(rank, empty) for rank in lengths}

    def send(self, data: Tensor, to: int) -> Any:
        """Start sending bytes to a rank; keep ``data`` until the result's ``wait`` has returned."""
        return self._group.send([data], self._places[to], 0)

    def receive(self, length: int, source: int) -> Tensor:
        """The next bytes that a rank sends here."""
        data = torch.empty(length, dtype=torch.uint8)
        with self._mesh.activity.waiting(f"bytes from rank {source}", sorted((source, self._rank))):
            self._group.recv([data], self._places[source], 0).wait()
        return data
