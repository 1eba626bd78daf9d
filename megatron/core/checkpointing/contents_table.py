"""``.metadata`` of torch.distributed.checkpoint, a pickle of its own classes: read as records, and built here anew.

What it says is checked against itself: boxes lie in their tensors, and numbers fit into the bytes that hold them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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

from megatron.core.checkpointing.unpickling import STOOD_IN_FOR, Builders, StandIn, key_of, mapping_of, unpickle
from megatron.errors import CheckpointError

_DCP = "torch.distributed.checkpoint."
_NAMES = (
    *(
        f"{_DCP}metadata.{name}"
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    f"{_DCP}filesystem._StorageInfo",
    "torch.serialization._get_layout",
    "pathlib.PosixPath",
    "pathlib.WindowsPath",
)


def read_table(file: IO[bytes], *, is_foreign: bool) -> Metadata:
    """The table of contents in ``file``; CheckpointError, or almost any other error, where it is none.

    ``is_foreign``: it may name classes of the program that wrote it, which come to nothing.
    """
    found = unpickle(file, _BUILDERS, stood_in_for=STOOD_IN_FOR if is_foreign else ())
    table = _fields(found, "metadata.Metadata")
    entries = {_text(name): _entry(name, entry) for name, entry in table["state_dict_metadata"].items()}
    places = {_index(index): _place(place) for index, place in table["storage_data"].items()}
    for name, entry in entries.items():
        if isinstance(entry, BytesStorageMetadata):
            continue
        for chunk in entry.chunks:
            place = places.get(MetadataIndex(name, chunk.offsets))
            if place is None or math.prod(chunk.sizes) * entry.properties.dtype.itemsize > place.length:
                raise CheckpointError(f"a box of {name} at {list(chunk.offsets)} has no place that could hold it")
    return Metadata(entries, storage_data=places)


def _fields(value: Any, name: str) -> Mapping[str, Any]:
    """The attributes of what was an instance of DCP's class ``name``."""
    if not isinstance(value, StandIn) or value.stands_for != _DCP + name or not isinstance(value.state, dict):
        raise CheckpointError(f"{ascii(value)[:60]} is not a {name.rpartition('.')[2]}")
    return value.state


def _entry(name: str, value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(value, StandIn) and value.stands_for == f"{_DCP}metadata.BytesStorageMetadata":
        return BytesStorageMetadata()
    fields = _fields(value, "metadata.TensorStorageMetadata")
    properties, size = fields["properties"], _shape(fields["size"])
    dtype = properties.state[0] if isinstance(properties, StandIn) and properties.state else None
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{name} has no type of numbers")
    chunks = []
    for each in fields["chunks"]:
        chunk = _fields(each, "metadata.ChunkStorageMetadata")
        offsets, sizes = _shape(chunk["offsets"]), _shape(chunk["sizes"])
        ends = [offset + length for offset, length in zip(offsets, sizes)]
        if not len(offsets) == len(sizes) == len(size) or any(end > length for end, length in zip(ends, size)):
            raise CheckpointError(f"a box of {name} at {list(offsets)} lies outside its shape {list(size)}")
        chunks.append(ChunkStorageMetadata(offsets, sizes))
    if sum(math.prod(chunk.sizes) for chunk in chunks) < math.prod(size):
        raise CheckpointError(f"the boxes of {name} are fewer than its shape {list(size)} needs")
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)


def _index(value: Any) -> MetadataIndex:
    fields = _fields(value, "metadata.MetadataIndex")
    offset, hint = fields.get("offset"), fields.get("index")
    if hint is not None and type(hint) is not int:
        raise CheckpointError("a box has no number")
    return MetadataIndex(_text(fields["fqn"]), None if offset is None else _shape(offset), hint)


def _place(value: Any) -> _StorageInfo:
    fields = _fields(value, "filesystem._StorageInfo")
    offset, length = _shape((fields["offset"], fields["length"]))
    if fields.get("transform_descriptors"):
        raise CheckpointError("its files are compressed, which is not read here")
    return _StorageInfo(_text(fields["relative_path"]), offset, length)


def _text(value: Any) -> str:
    if type(value) is not str:
        raise CheckpointError(f"{ascii(value)[:60]} is not a name")
    return value


def _shape(value: Any) -> torch.Size:
    if type(value) is not tuple or not all(type(length) is int and 0 <= length < 2**48 for length in value):
        raise CheckpointError(f"{ascii(value)[:60]} is not a shape")
    return torch.Size(value)


_BUILDERS: Builders = {**dict.fromkeys(_NAMES), "torch.Size": key_of, "collections.OrderedDict": mapping_of}
