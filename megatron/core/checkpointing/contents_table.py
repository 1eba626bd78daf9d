"""``.metadata`` of torch.distributed.checkpoint, a pickle of its own classes: read as records, and built here anew.

It is checked for consistency: boxes lie in their tensors, and numbers fit into the bytes that hold them.
"""

from __future__ import annotations

import gc
import math
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import add, gt
from typing import IO, Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron.core.checkpointing.unpickling import MOST_DIMS, Builders, Placeholder, mapping_of, unpickle
from megatron.errors import CheckpointError

_DCP = "torch.distributed.checkpoint."
_NAMES = (
    *(f"{_DCP}metadata.{name}Metadata" for name in ("", "BytesStorage", "ChunkStorage", "TensorStorage")),
    *(
        f"{_DCP}metadata.{name}"
        for name in ("MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING")
    ),
    *(f"{_DCP}filesystem._StorageInfo", "torch.serialization._get_layout"),
    *("pathlib.PosixPath", "pathlib.WindowsPath"),
    "builtins.getattr",  # how Python 3.11 pickles a member of an enum
)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """The collector would search a million new containers, none of them garbage, over and over."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_without_garbage_collection()
def read_table(file: IO[bytes], *, is_foreign: bool) -> Metadata:
    """The table of contents in ``file``; CheckpointError, or almost any other error, where it is none.

    ``is_foreign``: it may name classes of the program that wrote it, which are ignored.
    """
    found = unpickle(file, _BUILDERS, is_foreign=is_foreign)
    table = _fields(found, "metadata.Metadata")
    entries = {_text(name): _entry(name, entry) for name, entry in table["state_dict_metadata"].items()}
    places = {_index(index): _place(place) for index, place in table["storage_data"].items()}
    for name, entry in entries.items():
        if isinstance(entry, BytesStorageMetadata):
            continue
        for chunk in entry.chunks:
            place = places.get(MetadataIndex(name, chunk.offsets))
            if place is None or math.prod(chunk.sizes) * entry.properties.dtype.itemsize > place.length:
                raise CheckpointError(
                    f"tensor {name}, shape {list(entry.size)}, has no listed storage file large enough for its chunk "
                    f"of shape {list(chunk.sizes)} at {list(chunk.offsets)}"
                )
    return Metadata(entries, storage_data=places)


def _fields(value: Any, name: str) -> Mapping[str, Any]:
    """The attributes of what was an instance of DCP's class ``name``."""
    if not isinstance(value, Placeholder) or value.stands_for != _DCP + name or not isinstance(value.state, dict):
        raise CheckpointError(f"{_shown(value)} is not a {name.rpartition('.')[2]}")
    return value.state


def _entry(name: str, value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(value, Placeholder) and value.stands_for == f"{_DCP}metadata.BytesStorageMetadata":
        return BytesStorageMetadata()
    fields = _fields(value, "metadata.TensorStorageMetadata")
    properties, size = fields["properties"], _shape(fields["size"])
    dtype = properties.state[0] if isinstance(properties, Placeholder) and properties.state else None
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"tensor {name}, shape {list(size)}, has no dtype")
    chunks, filled = [], 0
    for each in fields["chunks"]:
        chunk = _fields(each, "metadata.ChunkStorageMetadata")
        offsets, sizes = _shape(chunk["offsets"]), _shape(chunk["sizes"])
        if not len(offsets) == len(sizes) == len(size) or any(map(gt, map(add, offsets, sizes), size)):
            raise CheckpointError(
                f"tensor {name}, shape {list(size)}, has a chunk of shape {list(sizes)} at {list(offsets)}, outside it"
            )
        chunks.append(ChunkStorageMetadata(offsets, sizes))
        filled += math.prod(sizes)
    if filled < math.prod(size):
        raise CheckpointError(f"tensor {name}, shape {list(size)}, has chunks for only {filled:,} of its elements")
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)


def _index(value: Any) -> MetadataIndex:
    fields = _fields(value, "metadata.MetadataIndex")
    offset = fields.get("offset")
    return MetadataIndex(_text(fields["fqn"]), None if offset is None else _shape(offset))


def _place(value: Any) -> _StorageInfo:
    fields = _fields(value, "filesystem._StorageInfo")
    offset, length = _shape((fields["offset"], fields["length"]))
    if fields.get("transform_descriptors"):
        raise CheckpointError("its files are compressed, which is not read here")
    return _StorageInfo(_text(fields["relative_path"]), offset, length)


def _text(value: Any) -> str:
    if type(value) is not str:
        raise CheckpointError(f"{_shown(value)} is not a name")
    return value


def _shape(value: Any) -> torch.Size:
    if type(value) is not tuple or len(value) > MOST_DIMS:
        raise CheckpointError(f"{_shown(value)} is not a shape")
    for length in value:
        if type(length) is not int or not 0 <= length < 2**48:
            raise CheckpointError(f"{_shown(value)} is not a shape")
    return torch.Size(value)


def _shown(value: Any) -> str:
    """The beginning of a value, which may be very large."""
    return ascii(reprlib.repr(value))[1:-1][:60]


_BUILDERS: Builders = {
    **dict.fromkeys(_NAMES),
    "torch.Size": lambda dims=(): dims,  # checked where a shape is needed
    "collections.OrderedDict": mapping_of,
}
