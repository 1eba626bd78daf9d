"""Files of torch.distributed.checkpoint: written with a checksum taken on the way, read without trusting them.

The format is DCP's own, so its tools read our folders. Two things differ from its own reader: pickles (``.metadata``
and every box) only give plain data, and a stored box that several requests need is read once. A folder may be in object
storage, too.
"""

from __future__ import annotations

import io
import itertools
import os
import zlib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future
from typing_extensions import override

from megatron.core.checkpointing.base import base_of
from megatron.core.checkpointing.contents_table import read_table
from megatron.core.checkpointing.manifest import METADATA, FileRecord, Manifest
from megatron.core.checkpointing.torch_files import load_torch_bytes
from megatron.core.files.remote_path import AnyPath, RemotePath
from megatron.errors import CheckpointError
from megatron.small_files import check_regular

_OF_BASE = "base:"
"""Prefix of the names of files that are in the checkpoint that this one refers to."""


class _ChecksummedStream:
    """A file open for writing that keeps the CRC-32 of what went through it, and the error that stopped it."""

    def __init__(self, file: IO[bytes], path: AnyPath) -> None:
        self._file = file
        self._on_disk = isinstance(path, Path)
        self.name = str(path)
        self.size = 0
        self.crc32 = 0
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        try:
            written = self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.size += written
        self.crc32 = zlib.crc32(data, self.crc32)
        return written

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        """Everything is durable after this: on the disk, or taken by the storage service."""
        if not self._file.closed:
            self._file.flush()
            if self._on_disk:
                os.fsync(self._file.fileno())
            self._file.close()


class ChecksummedFiles(FileSystem):
    """DCP's file system, here or in object storage, with the record of each file written through it in ``written``.

    A file is durable when its stream has been closed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[str, FileRecord] = {}

    @contextmanager
    @override
    def create_stream(self, path: AnyPath, mode: str) -> Iterator[io.IOBase]:  # type: ignore[override]
        """Open ``path`` for writing; what stops it comes out as an OSError that names it.

        ``torch.save`` answers an error in the middle of a record with a RuntimeError about positions.
        """
        stream: _ChecksummedStream | None = None
        try:
            with path.open(mode) as file:
                stream = _ChecksummedStream(cast(IO[bytes], file), path)
                yield stream  # type: ignore[misc]
                stream.close()
        except (OSError, RuntimeError) as error:
            reason = stream.error if stream is not None and stream.error is not None else error
            if not isinstance(reason, OSError):
                raise
            raise OSError(reason.errno, reason.strerror, str(path)) from error
        self.written[path.name] = FileRecord(stream.size, stream.crc32)

    @override
    def concat_path(self, path: AnyPath, suffix: str) -> AnyPath:  # type: ignore[override]
        """The file ``suffix`` of the folder ``path``."""
        return path / suffix

    @override
    def exists(self, path: AnyPath) -> bool:  # type: ignore[override]
        """Whether there is such a file."""
        return path.exists()

    @override
    def rename(self, path: AnyPath, new_path: AnyPath) -> None:  # type: ignore[override]
        """Give a file its name; object stores can only put it once more. No checkpoint counts yet in which it is."""
        if isinstance(path, RemotePath):
            with new_path.open("wb") as file:
                file.write(path.read_bytes())
            path.unlink()
        else:
            path.rename(cast(Path, new_path))


class CheckpointWriter(FileSystemWriter):
    """DCP's writer: one file a rank, synced to disk, with checksums in ``files.written``."""

    def __init__(self, folder: AnyPath) -> None:
        super().__init__("", sync_files=False)  # the streams sync themselves
        self.path = folder  # type: ignore[assignment]
        self.files = ChecksummedFiles()
        self.fs = self.files

    @override
    def storage_meta(self) -> StorageMeta:
        """Nothing about this machine's paths goes into the file."""
        return StorageMeta()


class CheckpointReader(FileSystemReader):
    """DCP's reader for folders that aren't trusted.

    ``foreign``: the folder is of another program (Megatron-LM's torch_dist), whose table of contents may name its own
    classes and list pickled objects beside tensors; none of these is built. ``is_verified``: the files' checksums
    have just been compared, so those of single boxes are not. Where the checkpoint holds only what was trained beside
    the weights of another one, tensors that it lacks are those of that one.
    """

    def __init__(self, folder: AnyPath, *, foreign: bool = False, is_verified: bool = False) -> None:
        super().__init__("")
        self._folder = folder
        self._foreign = foreign
        self._is_verified = is_verified
        self._base: CheckpointReader | None = None

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Table of contents of the checkpoint; raises CheckpointError when it isn't one."""
        path = self._folder / METADATA
        check_regular(path, where=str(path), error=CheckpointError)
        try:
            with path.open("rb") as file:
                metadata = read_table(cast(IO[bytes], file), is_foreign=self._foreign)
        except OSError:
            raise
        except Exception as error:  # a damaged pickle raises almost anything
            raise CheckpointError(f"{path} is not a checkpoint's table of contents: {error}") from error
        if not self._foreign and len(tensors_in(metadata)) < len(metadata.state_dict_metadata):
            raise CheckpointError(f"{path} lists pickled objects beside tensors; ours never do")
        if not self._foreign:
            self._check_listed(metadata)
            if (base := base_of(self._folder)) is not None:
                if base_of(base) is not None:
                    raise CheckpointError(f"{self._folder} refers to {base}, which is not whole itself")
                self._base = CheckpointReader(base)
                _add_missing(metadata, self._base.read_metadata())
        return metadata

    def _check_listed(self, metadata: Metadata) -> None:
        """Raise CheckpointError unless the manifest lists the files of all tensors: no other file is verified."""
        if not metadata.state_dict_metadata:
            raise CheckpointError(f"{self._folder / METADATA} lists no tensors")
        ends = dict[str, int]()
        for place in metadata.storage_data.values():
            ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
        try:
            Manifest.read(self._folder).check_holds(ends)
        except CheckpointError as error:
            raise CheckpointError(f"{self._folder}: {error}") from None

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the requested tensors in place; each stored box is read once, in the order of the files."""
        requests: dict[MetadataIndex, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            requests[item.storage_index].append(item)
        places = self.storage_data
        ordered = sorted(requests, key=lambda index: (places[index].relative_path, places[index].offset))
        for name, indices in itertools.groupby(ordered, key=lambda index: places[index].relative_path):
            with self.open(name) as file:
                for index in indices:
                    stored = self.load_box(index, file)
                    for item in requests[index]:
                        copy_box(stored, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def open(self, name: str) -> IO[bytes]:
        """A file of the checkpoint by its name in the table of contents."""
        if self._base is not None and name.startswith(_OF_BASE):
            return self._base.open(name.removeprefix(_OF_BASE))
        if Path(name).name != name:
            raise CheckpointError(f"{self._folder / METADATA} names {name!r}, which is not a file of this checkpoint")
        path = self._folder / name
        check_regular(path, where=str(path), error=CheckpointError)
        return cast(IO[bytes], path.open("rb"))

    def load_box(self, index: MetadataIndex, file: IO[bytes]) -> torch.Tensor:
        """The numbers of one stored box."""
        box = self.load_object(index, file)
        if not isinstance(box, torch.Tensor):
            raise CheckpointError(f"{file.name}: {index.fqn} is a {type(box).__name__}, not a tensor")
        return box

    def load_object(self, index: MetadataIndex, file: IO[bytes]) -> Any:
        """What was saved at a place of a file. Its bytes are taken in one go: over a network each read is a request."""
        place = self.storage_data[index]
        file.seek(place.offset)
        name = f"{file.name}: {index.fqn}"
        is_checked = not self._is_verified or place.relative_path.startswith(_OF_BASE)
        return load_torch_bytes(file, place.length, name=name, is_checked=is_checked)


def _add_missing(metadata: Metadata, base: Metadata) -> None:
    """Add the weights of a base that a checkpoint lacks to its table of contents."""
    missing = {
        name: entry
        for name, entry in base.state_dict_metadata.items()
        if name.startswith("model.") and name not in metadata.state_dict_metadata
    }
    metadata.state_dict_metadata |= missing
    for index, place in base.storage_data.items():
        if index.fqn in missing:
            metadata.storage_data[index] = replace(place, relative_path=_OF_BASE + place.relative_path)


def copy_box(stored: torch.Tensor, item: ReadItem, planner: LoadPlanner) -> None:
    """Copy the part of a stored box that is asked for to where the planner wants it."""
    ends = [offset + length for offset, length in zip(item.storage_offsets, item.lengths)]
    if stored.dim() != len(ends) or any(end > length for end, length in zip(ends, stored.shape)):
        raise CheckpointError(
            f"a box of {item.storage_index.fqn} is {list(stored.shape)}, which differs from {METADATA}"
        )
    target = planner.resolve_tensor(item)
    source = stored
    for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths)):
        source = source.narrow(dim, offset, length)
    target.copy_(source)
    planner.commit_tensor(item, target)


def tensors_in(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """The tensors of a checkpoint by name."""
    entries = metadata.state_dict_metadata.items()
    return {name: entry for name, entry in entries if isinstance(entry, TensorStorageMetadata)}
