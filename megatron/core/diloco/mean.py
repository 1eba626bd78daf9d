"""The mean of a tensor over the workers, which sums in fp32 whatever format the numbers travel in."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron.core.diloco.wire import Wire
from megatron.core.parallel.collectives import Handle, all_gather_async, all_reduce
from megatron.core.parallel.exchange import RankGroup, start_all_to_all_rows
from megatron.core.parallel.mesh import Mesh


class WorkersMean:
    """The mean of 1-D ``numbers`` over the workers' counterparts of this rank, on its way in two halves.

    Each rank receives its part from all and sums it in the order of workers, then all gather the means of the parts:
    two times (k-1)/k of the numbers are sent, in the format of ``wire``, and the result is bitwise the same on all.
    Making one, ``advance`` and ``wait`` are collectives.
    """

    def __init__(self, numbers: Tensor, mesh: Mesh, wire: Wire) -> None:
        self._mesh, self._wire, self._size, self._dtype = mesh, wire, len(numbers), numbers.dtype
        workers = mesh.size("dc")
        rows = pad(numbers, (0, -len(numbers) % (workers * wire.block))).view(workers, -1)
        one_each = [1] * workers
        self._parts: Handle[Tensor] | None = start_all_to_all_rows(
            wire.encode(rows), RankGroup.of(mesh, "dc"), one_each, one_each
        )
        self._means: Handle[Tensor] | None = None

    def advance(self) -> None:
        """Start the second half, once the first has arrived; does nothing a second time."""
        if self._parts is not None:
            parts = self._wire.decode(self._parts.wait(), self._dtype)
            mean = parts.sum(0, keepdim=True).div_(len(parts))
            self._means, self._parts = all_gather_async(self._wire.encode(mean), self._mesh, "dc"), None

    def wait(self) -> Tensor:
        """The mean ``[numbers]``."""
        self.advance()
        assert self._means is not None, "advance has started it"
        return self._wire.decode(self._means.wait(), self._dtype).view(-1)[: self._size]


def mean_over_workers(values: dict[str, float], mesh: Mesh, device: torch.device) -> dict[str, float]:
    """Each value's mean over the workers. A collective, which waits."""
    if mesh.size("dc") == 1 or not values:
        return values
    sums = all_reduce(torch.tensor([*values.values()], dtype=torch.float64, device=device), mesh, "dc")
    return dict(zip(values, (sums / mesh.size("dc")).tolist()))
