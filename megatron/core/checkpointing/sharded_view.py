"""Presents a local tensor as the logical tensor that it is part of; torch.distributed.checkpoint plans with it.

DCP asks any object in a state dict three things: which chunks it would write, which chunks it wants to read, and where
the numbers of one chunk are. A ``ShardedView`` answers with the boxes of its shard, so ranges of tensor-parallel shards
are written and read in place, by any layout, without gathering.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from typing_extensions import override

from megatron.core.checkpointing.boxes import Box, boxes
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.sharding import ShardedState


class ShardedView(Tensor):
    """The logical tensor of a ``ShardedState`` seen from one rank: its shape, and the boxes that are here.

    It holds no numbers of its own: chunks are strided views of the state's tensor, so reading into a chunk fills that
    tensor. It takes part in no arithmetic.
    """

    _flat: Tensor
    _boxes: dict[tuple[int, ...], Box]

    @classmethod
    def of(cls, state: ShardedState, mesh: Mesh) -> ShardedView:
        """View of ``state`` on the rank of ``mesh``."""
        parts = boxes(state.sharding, mesh, flat_range=state.flat_range)
        return cls._wrap(state.tensor.detach().view(-1), shape=state.sharding.shape, parts=parts)

    def copied(self, staging: Staging, name: str) -> ShardedView:
        """A view of a copy in main memory, which later updates of the tensor don't reach."""
        return self._wrap(staging.copy(name, self._flat), shape=tuple(self.shape), parts=self._boxes.values())

    @classmethod
    def _wrap(cls, flat: Tensor, *, shape: tuple[int, ...], parts: Iterable[Box]) -> ShardedView:
        view: ShardedView = cls._make_wrapper_subclass(cls, shape, dtype=flat.dtype, device=flat.device)
        view._flat = flat
        view._boxes = {box.offsets: box for box in parts}
        return view

    def __create_write_items__(self, fqn: str, tensor: Tensor) -> list[WriteItem]:
        """One item for each box, under its offsets in the logical tensor."""
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """The boxes in DCP's terms."""
        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in self._boxes.values()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The numbers of the box at ``index.offset``, as a view into the state's tensor."""
        assert index.offset is not None, f"{index.fqn}: a box is found by its offset"
        box = self._boxes[tuple(index.offset)]
        return self._flat.as_strided(box.sizes, box.strides, self._flat.storage_offset() + box.start)

    @classmethod
    @override
    def __torch_dispatch__(cls, func: object, *args: object, **kwargs: object) -> Tensor:  # type: ignore[override]
        """Refuse arithmetic: most of the logical tensor is on other ranks."""
        raise NotImplementedError(f"{func}: a ShardedView describes a tensor to checkpoints; it holds no numbers")


class Staging:
    """Main memory for copies of what this rank writes. It is kept from save to save: getting fresh memory from the
    system takes longer than copying into it. The copies of one save must have been written before the next is made.
    """

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}

    def copy(self, name: str, flat: Tensor) -> Tensor:
        """A copy of ``flat``, in the place of the last one under this ``name``."""
        place = self._copies.get(name)
        if place is None or place.shape != flat.shape or place.dtype != flat.dtype:
            place = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=flat.device.type != "cpu")
            self._copies[name] = place
        return place.copy_(flat)


def sharded_views(state: Iterable[ShardedState], mesh: Mesh) -> dict[str, ShardedView]:
    """A state dict for DCP, by name. Each tensor is as long as its sharding or flat range says, and contiguous."""
    views: dict[str, ShardedView] = {}
    for part in state:
        start, stop = part.flat_range or (0, math.prod(part.sharding.local_shape(mesh)))
        assert part.tensor.numel() == stop - start, f"{part.name}: {part.tensor.numel()} numbers for [{start}, {stop})"
        assert part.tensor.is_contiguous(), f"{part.name} is not contiguous, so its boxes can't be filled in place"
        assert part.name not in views, f"{part.name} is there twice on one rank"
        views[part.name] = ShardedView.of(part, mesh)
    return views
