"""Writing tensors that are made one after another: what is in memory is the one being written, never the model.

torch's own writer keeps every tensor of a file until the file is closed; here each is forgotten once it is written.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from megatron.core.checkpointing.storage import CheckpointWriter
from megatron.core.files.remote_path import AnyPath
from megatron.errors import CheckpointError

FILE_SIZE = 4 << 30  # bytes after which the next box starts another file, so that ranks share reading and checking


class SourceError(CheckpointError):
    """A tensor that can't be made, so that it can't be written either; the folder it was for is not at fault."""


@dataclass(frozen=True)
class StreamedBox:
    """The box at ``offsets`` of the tensor ``name`` of ``shape``, made when its turn comes; boxes tile a tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    make: Callable[[], Tensor]

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...], dtype: torch.dtype, make: Callable[[], Tensor]) -> StreamedBox:
        """A tensor in one piece."""
        return cls(name, shape, dtype, (0,) * len(shape), shape, make)


def table_of(boxes: Iterable[StreamedBox]) -> Metadata:
    """The table of contents of a folder that holds ``boxes``; where they lie is filled in when it is written."""
    chunks: dict[str, list[ChunkStorageMetadata]] = defaultdict(list)
    tensors: dict[str, StreamedBox] = {}
    for box in boxes:
        tensors[box.name] = box
        chunks[box.name].append(ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)))
    return Metadata(
        {
            name: TensorStorageMetadata(TensorProperties(dtype=box.dtype), torch.Size(box.shape), chunks[name])
            for name, box in tensors.items()
        }
    )


def write_boxes(
    writer: CheckpointWriter, folder: AnyPath, boxes: Sequence[StreamedBox], *, file_size: int = FILE_SIZE
) -> list[WriteResult]:
    """Make and write every box in turn; where each one lies."""
    results: list[WriteResult] = []
    remaining = iter(boxes)
    for number in itertools.count():
        first = next(remaining, None)
        if first is None:
            return results
        name = f"__0_{number}.distcp"
        with writer.files.create_stream(folder / name, "wb") as stream:
            for box in itertools.chain([first], remaining):
                start = stream.tell()
                tensor = box.make().detach().contiguous()
                assert tuple(tensor.shape) == box.sizes and tensor.dtype == box.dtype, f"{box.name} is another tensor"
                if tensor.untyped_storage().nbytes() != tensor.nbytes:
                    tensor = tensor.clone()  # torch.save writes the storage, not the view
                torch.save(tensor, stream)  # type: ignore[arg-type]
                place = _StorageInfo(name, start, stream.tell() - start)
                index = MetadataIndex(box.name, torch.Size(box.offsets))
                results.append(WriteResult(index, tensor.nbytes, place))
                del tensor  # before the next one is made
                if stream.tell() >= file_size:
                    break
    raise AssertionError("unreachable")


def write_objects(
    writer: CheckpointWriter, folder: AnyPath, objects: Mapping[str, bytes], table: Metadata
) -> list[WriteResult]:
    """Write pickled objects, which folders of other programs hold beside tensors, and list them in ``table``."""
    results, name = [], "__0_objects.distcp"
    with writer.files.create_stream(folder / name, "wb") as stream:
        for key, data in objects.items():
            place = _StorageInfo(name, stream.tell(), len(data))
            stream.write(data)
            table.state_dict_metadata[key] = BytesStorageMetadata()
            results.append(WriteResult(MetadataIndex(key), len(data), place))
    return results
