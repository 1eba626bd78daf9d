"""Tensors of a checkpoint one at a time, by name, without a process group and without a model to load them into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, MetadataIndex

from megatron.core.checkpointing.storage import CheckpointReader, tensors_in
from megatron.core.files.remote_path import AnyPath
from megatron.errors import CheckpointError


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in the table of contents."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class StoredTensors:
    """The tensors in ``folder``; only the table of contents is read until one is asked for.

    ``foreign``: the folder is a torch_dist checkpoint of Megatron-LM's.
    """

    def __init__(self, folder: AnyPath, *, foreign: bool = False) -> None:
        self._folder = folder
        self._reader = CheckpointReader(folder, foreign=foreign)
        metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, is_coordinator=False)
        self._stored = tensors_in(metadata)
        self.entries: Mapping[str, TensorEntry] = {
            name: TensorEntry(tuple(entry.size), entry.properties.dtype) for name, entry in self._stored.items()
        }
        self.model: Mapping[str, TensorEntry] = {
            name.removeprefix("model."): entry for name, entry in self.entries.items() if name.startswith("model.")
        }
        """Entries of the model's parameters, by the parameters' names."""
        self.objects = [
            name for name, entry in metadata.state_dict_metadata.items() if isinstance(entry, BytesStorageMetadata)
        ]
        """Names of pickled objects beside the tensors; a foreign folder may have some."""

    def read(self, name: str, *, at: int | None = None) -> Tensor:
        """A whole tensor, or, with ``at``, its element ``at`` along the first dim (one layer of a stack)."""
        entry = self.entries[name]
        rows = (at, at + 1) if at is not None else (0, entry.shape[0] if entry.shape else 1)
        shape = (rows[1] - rows[0], *entry.shape[1:]) if entry.shape else ()
        chunks = [
            chunk
            for chunk in self._stored[name].chunks
            if not chunk.sizes or (chunk.offsets[0] < rows[1] and rows[0] < chunk.offsets[0] + chunk.sizes[0])
        ]
        if len(chunks) == 1 and tuple(chunks[0].sizes) == shape:
            return self._box(name, chunks[0]) if at is None else self._box(name, chunks[0])[0]
        whole = torch.empty(shape, dtype=entry.dtype)
        filled = 0
        for chunk in chunks:
            box = self._box(name, chunk)
            low, high = max(chunk.offsets[0], rows[0]), min(chunk.offsets[0] + chunk.sizes[0], rows[1])
            target = whole[low - rows[0] : high - rows[0]]
            for dim, (offset, size) in enumerate(zip(chunk.offsets[1:], chunk.sizes[1:]), start=1):
                target = target.narrow(dim, offset, size)
            target.copy_(box[low - chunk.offsets[0] : high - chunk.offsets[0]])
            filled += target.numel()
            del box  # before the next one is read
        if filled != whole.numel():
            raise CheckpointError(f"{self._folder}: the boxes of {name} hold {filled} numbers of {whole.numel()}")
        return whole if at is None else whole[0]

    def read_object(self, name: str) -> Any:
        """A pickled object, as plain data and stand-ins."""
        index = MetadataIndex(name)
        with self._reader.open(self._reader.storage_data[index].relative_path) as file:
            return self._reader.load_object(index, file)

    def _box(self, name: str, chunk: ChunkStorageMetadata) -> Tensor:
        index = MetadataIndex(name, chunk.offsets)
        with self._reader.open(self._reader.storage_data[index].relative_path) as file:
            box = self._reader.load_box(index, file)
        if (box.shape, box.dtype) != (chunk.sizes, self.entries[name].dtype):
            raise CheckpointError(
                f"{self._folder}: a box of {name} is {list(box.shape)} in {box.dtype}, which differs from the list"
            )
        return box
