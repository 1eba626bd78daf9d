"""``manifest.json``: the size and checksum of every file of a checkpoint, which show whether it is whole."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, cast

from megatron.core.files.remote_path import AnyPath, RemotePath
from megatron.errors import RESTART_MAY_HELP, CheckpointError, exit_code_of
from megatron.small_files import Between, as_kind, check_regular, read_json

MANIFEST, METADATA, RUN_FILE = "manifest.json", ".metadata", "run.json"
_READ_SIZE = 1 << 20
_Count = Annotated[int, Between(0, 2**63 - 1)]
_Seconds = Annotated[float, Between(0, 2**37)]  # until the year 6325


@dataclass(frozen=True)
class FileRecord:
    """What a file must be: ``size`` in bytes, ``crc32`` of its bytes as zlib computes it."""

    size: _Count
    crc32: _Count


@dataclass(frozen=True)
class Manifest:
    """The files of one checkpoint, and when it was saved (seconds since 1970): the latest saved is the newest."""

    iteration: _Count
    saved_at: _Seconds
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
        try:
            sizes = self._sizes(folder)
        except OSError as error:
            return [f"{str(error.filename).rpartition('/')[2]} {unreadable(folder, error)}"]
        found = ((name, sizes.get(name), record.size) for name, record in self.files.items())
        unlisted = [f"{MANIFEST} does not list {name}" for name in (METADATA, RUN_FILE) if name not in self.files]
        return unlisted + [
            f"{name} is missing" if size is None else f"{name} holds {size} bytes in place of {expected}"
            for name, size, expected in found
            if size != expected
        ]

    def _sizes(self, folder: AnyPath) -> dict[str, int]:
        """Sizes of the files that are there; in object storage, for one listing in place of a request for each."""
        if isinstance(folder, Path):
            paths = {name: folder / name for name in self.files}
            return {name: path.stat().st_size for name, path in paths.items() if path.exists()}
        below = {name.rpartition("/")[0] for name in self.files}
        return {
            f"{inner}/{name}".lstrip("/"): size
            for inner in below
            for name, size in (folder / inner if inner else folder).sizes_below().items()
        }

    def check_holds(self, ends: Mapping[str, int]) -> None:
        """Raise CheckpointError unless every file is listed with at least as many bytes as ``ends`` says are read."""
        for name, end in ends.items():
            record = self.files.get(name)
            if record is None or record.size < end:
                known = f"{MANIFEST} lists with {record.size:,} bytes" if record else "is not a file of this checkpoint"
                without = "" if record else f": {MANIFEST} does not list it"
                raise CheckpointError(f"tensors need {end:,} bytes of {name!r}, which {known}{without}")

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
    check_regular(path, where=str(path), error=CheckpointError)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            size += count
            crc = zlib.crc32(buffer[:count], crc)
    return FileRecord(size, crc)


def listed(problems: Sequence[str], separator: str = ", ", most: int = 6) -> str:
    """The first of several problems or names, and how many more there are."""
    more = f" and {len(problems) - most} more" if len(problems) > most else ""
    return separator.join(problems[:most]) + more


def unreadable(folder: AnyPath, error: OSError) -> str:
    """The problem of a file that a disk can't read, in words. Raises ``error`` where a storage service itself fails."""
    if isinstance(folder, RemotePath) and exit_code_of(error) == RESTART_MAY_HELP:
        raise error
    return f"cannot be read ({error.strerror})"


def _json_checksum(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body).encode())
