"""``manifest.json``: the size and checksum of every file of a checkpoint, by which it is known to be whole."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from megatron.core.files.remote_path import AnyPath, RemotePath
from megatron.errors import RESTART_MAY_HELP, CheckpointError, exit_code_of
from megatron.small_files import as_kind, read_json

MANIFEST = "manifest.json"
_READ_SIZE = 1 << 20


@dataclass(frozen=True)
class FileRecord:
    """What a file must be: ``size`` in bytes, ``crc32`` of its bytes as zlib computes it."""

    size: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """The files of one checkpoint, and when it was saved (seconds since 1970): the latest saved is the newest."""

    iteration: int
    saved_at: float
    files: Mapping[str, FileRecord]

    def to_json(self) -> str:
        """Text of ``manifest.json``, which carries the checksum of its own contents too."""
        body = asdict(self)
        return json.dumps({**body, "crc32": _json_checksum(body)}, indent=1) + "\n"

    @classmethod
    def read(cls, folder: AnyPath) -> Manifest:
        """The manifest in ``folder``; raises CheckpointError when there is none or it is damaged, and OSError, as other
        methods do, when object storage fails.
        """
        try:
            body = read_json(folder / MANIFEST, dict[str, Any], where=MANIFEST, error=CheckpointError)
        except FileNotFoundError:
            raise CheckpointError(f"{MANIFEST} is missing") from None
        except OSError as error:
            raise CheckpointError(f"{MANIFEST} {unreadable(folder, error)}") from error
        if body.pop("crc32", None) != _json_checksum(body):
            raise CheckpointError(f"{MANIFEST} is damaged (checksum mismatch)")
        manifest = cast(Manifest, as_kind(body, cls, where=MANIFEST, error=CheckpointError))
        for name in manifest.files:
            if name.startswith("/") or ".." in name.split("/"):
                raise CheckpointError(f"{MANIFEST} names {ascii(name)[:60]}, which is not a file of the checkpoint")
        return manifest

    def size_problems(self, folder: AnyPath) -> list[str]:
        """Files of ``folder`` that are missing or of another size, each with the reason. Reads no contents."""
        if isinstance(folder, RemotePath):
            return self._remote_size_problems(folder)
        problems = (_size_problem(folder, name, record) for name, record in self.files.items())
        return [problem for problem in problems if problem]

    def _remote_size_problems(self, folder: RemotePath) -> list[str]:
        try:
            inner = {name.rpartition("/")[0] for name in self.files}
            sizes = {
                f"{below}/{name}".lstrip("/"): size
                for below in inner
                for name, size in (folder / below if below else folder).sizes_below().items()
            }
        except OSError as error:
            return [f"{folder.name} {unreadable(folder, error)}"]
        found = ((name, sizes.get(name), record.size) for name, record in self.files.items())
        return [_size_words(name, size, expected) for name, size, expected in found if size != expected]

    def checksum_problems(self, folder: AnyPath, names: Iterable[str]) -> list[str]:
        """Files among ``names`` whose bytes are not those that were written. Reads them whole."""
        problems = []
        for name in names:
            try:
                if checksum(folder / name) != self.files[name]:
                    problems.append(f"{name} is damaged (checksum mismatch)")
            except OSError as error:
                problems.append(f"{name} {unreadable(folder, error)}")
        return problems


def checksum(path: AnyPath) -> FileRecord:
    """Size and CRC-32 of a file, read in bounded memory."""
    buffer = memoryview(bytearray(_READ_SIZE))
    size = crc = 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            size += count
            crc = zlib.crc32(buffer[:count], crc)
    return FileRecord(size, crc)


def _size_problem(folder: Path, name: str, record: FileRecord) -> str | None:
    try:
        size = (folder / name).stat().st_size
    except FileNotFoundError:
        return _size_words(name, None, record.size)
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return None if size == record.size else _size_words(name, size, record.size)


def _size_words(name: str, size: int | None, expected: int) -> str:
    return f"{name} is missing" if size is None else f"{name} holds {size} bytes in place of {expected}"


def unreadable(folder: AnyPath, error: OSError) -> str:
    """What to say of a file that a disk can't read. A service that fails says nothing about its objects: raise that."""
    if isinstance(folder, RemotePath) and exit_code_of(error) == RESTART_MAY_HELP:
        raise error
    return f"cannot be read ({error.strerror})"


def _json_checksum(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body).encode())
