"""A model's logical tensors on rank 0, one at a time, whatever the layout: for files that one process writes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.checkpointing.boxes import Box, boxes
from megatron.core.parallel.collectives import all_reduce, gather_objects
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.sharding import ShardedState

_CHUNK = 1 << 26
"""Bytes of a tensor that are on their way at once: what a rank needs beside its model."""


@dataclass(frozen=True)
class _Held:
    """A tensor that some rank holds, and the boxes of it there."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...]


class Gathering:
    """The tensors of all ranks' ``state`` by number: ``names``, ``shapes`` and ``dtypes``, the same on all ranks.

    A box that several ranks hold, such as a replica's or a tied copy's, comes from the first of them. Building one is a
    collective.
    """

    def __init__(self, state: Iterable[ShardedState], context: ParallelContext) -> None:
        self._context, mesh = context, context.mesh
        parts = list(state)
        self._mine = {part.name: part.tensor.view(-1) for part in parts}
        held = {}
        for part in parts:
            here = boxes(part.sharding, mesh, flat_range=part.flat_range)
            held[part.name] = _Held(part.sharding.shape, part.tensor.dtype, tuple(here))
        everyone = gather_objects(held, mesh)
        known = {name: each for theirs in reversed(everyone) for name, each in theirs.items()}
        self.names = sorted(known)
        self.shapes = [known[name].shape for name in self.names]
        self.dtypes = [known[name].dtype for name in self.names]
        before = everyone[: mesh.world_rank]
        elsewhere = {(name, box.offsets) for theirs in before for name, each in theirs.items() for box in each.boxes}
        self._boxes = {
            name: [box for box in each.boxes if (name, box.offsets) not in elsewhere] for name, each in held.items()
        }

    def gather(self, number: int) -> Tensor | None:
        """The tensor in main memory, on rank 0; None on the others. A collective."""
        name, shape, dtype = self.names[number], self.shapes[number], self.dtypes[number]
        mesh, device = self._context.mesh, self._context.device
        whole = torch.empty(shape, dtype=dtype) if mesh.world_rank == 0 else None
        if not shape:
            shape, whole = (1,), None if whole is None else whole.view(1)
        row = torch.Size(shape[1:]).numel() * dtype.itemsize
        height = max(1, _CHUNK // row)
        for start in range(0, shape[0], height):
            stop = min(start + height, shape[0])
            rows = torch.zeros((stop - start, *shape[1:]), dtype=dtype, device=device)
            for box in self._boxes.get(name, ()):
                self._copy(box, self._mine[name], rows, start=start)
            # Bytes, of which one rank alone has any: their sum is exact, also of a negative zero.
            all_reduce(rows.view(torch.uint8), mesh, "pp", "dp", "cp", "tp")
            if whole is not None:
                whole[start:stop] = rows.cpu()
        return None if whole is None else whole.view(self.shapes[number])

    @staticmethod
    def _copy(box: Box, flat: Tensor, rows: Tensor, *, start: int) -> None:
        """Copy the part of ``box`` that lies in ``rows``, which begin at row ``start`` of the logical tensor."""
        offsets, sizes = box.offsets or (0,), box.sizes or (1,)
        low, high = max(offsets[0], start), min(offsets[0] + sizes[0], start + len(rows))
        if low < high:
            here = flat.as_strided(sizes, box.strides or (1,), flat.storage_offset() + box.start)
            there = tuple(slice(at, at + size) for at, size in zip(offsets[1:], sizes[1:]))
            rows[(slice(low - start, high - start), *there)] = here[low - offsets[0] : high - offsets[0]]
