"""Messages of integers from rank 0 to all other ranks, which wait for them without a time-out."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.parallel.mesh import Mesh
from megatron.errors import ParallelError

_FOR_EVER = timedelta(days=365)
_FIRST = 1024  # integers of a message that travel with its length; more follow by themselves
_MESSAGE, _FAREWELL = 0, 1  # tags


class Messages:
    """A channel beside all collectives: waiting in it is neither a stall nor ends after the ranks' time-out.

    A collective over all ranks makes it. Messages go over gloo and through the CPU's memory, also between GPUs: other
    ranks wait without computing. ``failure``: on rank 0, the first rank that was lost, found out whether or not
    anything is sent.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._others = mesh, range(1, mesh.world_size)
        self._works: list[dist.Work] = []
        self._sent: list[Tensor] = []
        self._failure: ParallelError | None = None
        if mesh.world_size == 1:
            return
        store = dist.PrefixStore("messages", dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]
        # A group outside of torch's registry: its name need not be agreed upon, and its time-out is its own.
        self._group: Any = dist.ProcessGroupGloo(store, mesh.world_rank, mesh.world_size, _FOR_EVER)
        if mesh.world_rank == 0:
            for rank in self._others:
                threading.Thread(target=self._watch, args=(rank,), name=f"rank {rank}", daemon=True).start()

    @property
    def failure(self) -> ParallelError | None:
        """Why messages no longer reach all ranks."""
        return self._failure

    def send(self, numbers: Sequence[int]) -> None:
        """Send a message from rank 0. Waits until the message before has arrived. Raises ParallelError when a rank is
        lost.
        """
        if self._failure is not None:
            raise self._failure
        if not self._others:
            return
        message = torch.tensor([len(numbers), *numbers])
        parts = [message[: _FIRST + 1], message[_FIRST + 1 :]]
        try:
            self._wait()
            self._sent = [part for part in parts if len(part)]
            self._works = [self._group.send([part], rank, _MESSAGE) for rank in self._others for part in self._sent]
        except RuntimeError as error:
            raise self._lost(None, error) from error

    def receive(self) -> list[int]:
        """Wait for the next message on another rank than 0. Raises ParallelError when rank 0 is lost."""
        first = torch.empty(_FIRST + 1, dtype=torch.int64)
        try:
            self._group.recv([first], 0, _MESSAGE).wait()
            length = int(first[0])
            numbers: list[int] = first[1 : length + 1].tolist()
            if length > _FIRST:
                rest = torch.empty(length - _FIRST, dtype=torch.int64)
                self._group.recv([rest], 0, _MESSAGE).wait()
                numbers += rest.tolist()
        except RuntimeError as error:
            raise ParallelError(f"rank 0, which sends the requests, is gone ({error})") from error
        return numbers

    def close(self) -> None:
        """End after the last message: rank 0 stops watching this rank; on rank 0, the message has arrived."""
        if not self._others:
            return
        if self._mesh.world_rank:
            self._group.send([torch.zeros(1, dtype=torch.int64)], 0, _FAREWELL).wait()
        else:
            self._wait()

    def _wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []

    def _watch(self, rank: int) -> None:
        """Watch another rank, in a thread of rank 0: return when it says farewell, or report at once when it dies."""
        try:
            self._group.recv([torch.zeros(1, dtype=torch.int64)], rank, _FAREWELL).wait()
        except RuntimeError as error:
            self._lost(rank, error)

    def _lost(self, rank: int | None, error: RuntimeError) -> ParallelError:
        who = "a rank" if rank is None else f"rank {rank}"
        self._failure = self._failure or ParallelError(
            f"{who} of {self._mesh.world_size} is gone: its process failed, was killed or ran out of memory; see its "
            f"own message, the launcher's log and the kernel's ({error})"
        )
        return self._failure
