"""The file of an encoded piece: it appears whole or not at all, on a disk or in object storage.

After ``MAGIC`` follow, for each batch of lines and each key, the ids, the length of each sequence (int32) and the
number of sequences of each document (int64), all little-endian; then a record in JSON, its length (8 bytes), its
SHA-256 (32 bytes) and ``MAGIC`` again. The record has the number of each batch's ids, sequences and documents, and the
SHA-256 of what comes before it.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.indexed_format import LENGTH_DTYPE, OFFSET_DTYPE
from megatron.core.datasets.journal import Totals
from megatron.core.files.durable import replaced_file, write_errors
from megatron.core.files.range_reader import BLOCK, RangeReader
from megatron.core.files.remote_path import AnyPath, RemotePath
from megatron.core.tokenizers.encode import EncodedTexts
from megatron.core.tokenizers.line_batches import Position
from megatron.errors import DataError, exit_code_of
from megatron.small_files import parse_json

MAGIC = b"MGPIECE1"
_END = struct.Struct("<Q32s8s")
_NAME = re.compile(r"([0-9]{6})\.piece")
_BAD_LINES = 100  # kept of a piece; the others are counted


@dataclass(frozen=True)
class LeftOut:
    """A line without a document: number ``line`` of the file number ``file`` of the input."""

    file: int
    line: int
    reason: str


@dataclass
class PieceRecord:
    """What is known of a piece beside its ids.

    ``plan``: digest of settings and input. ``start``: where it begins. ``maker``: which share or worker made it.
    ``last_file`` and ``last_lines``: the last file that it has lines of, and how many. ``bad``: the first lines without
    a document; those of a file in whose middle the piece begins are counted from there. ``batches``: ids, sequences and
    documents of each batch and key, end to end.
    """

    plan: str
    number: int
    start: Position
    maker: str
    engine: str
    totals: Totals = field(default_factory=Totals)
    last_file: int = -1
    last_lines: int = 0
    bad: list[LeftOut] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    sha256: str = ""

    def add_lines(self, file: int, count: int) -> None:
        """Count lines of file number ``file``, which come in order."""
        if self.last_file != file:
            self.last_file, self.last_lines = file, 0
        self.last_lines += count

    def add_bad(self, file: int, line: int, reason: str) -> None:
        """Note a line without a document."""
        if len(self.bad) < _BAD_LINES:
            self.bad.append(LeftOut(file, line, reason))


class PieceFolder:
    """The folder of all pieces of a data set, below ``root``."""

    def __init__(self, root: AnyPath) -> None:
        self.root = root

    def path(self, number: int) -> AnyPath:
        """File of a piece."""
        return self.root / f"{number:06d}.piece"

    def finished(self) -> dict[int, int]:
        """Bytes of each piece that is there, by its number. Raises DataError where the folder can't be read."""
        with _reading(self.root):
            if isinstance(self.root, RemotePath):
                sizes = self.root.sizes_below()
            else:
                there = self.root.glob("*.piece") if self.root.is_dir() else ()
                sizes = {each.name: each.stat().st_size for each in there}
        numbers = {name: int(found[1]) for name in sizes if (found := _NAME.fullmatch(name))}
        return {number: sizes[name] for name, number in numbers.items()}

    @contextmanager
    def new(self, record: PieceRecord) -> Iterator[PieceWriter]:
        """A writer of the piece; its file appears when the block ends without an error."""
        path = self.path(record.number)
        if isinstance(path, Path):
            with write_errors(path), replaced_file(path) as aside, aside.open("wb") as file:
                yield from _written(file, record)
            return
        with tempfile.TemporaryDirectory(prefix="megatron-piece-") as folder:
            local = Path(folder) / path.name
            with write_errors(local, remedy="set TMPDIR to a folder with more"), local.open("wb") as file:
                yield from _written(file, record)
            with write_errors(path, remedy="write to another place"):
                path.copy_from(local)

    def read_record(self, number: int, size: int) -> PieceRecord:
        """What is known of a piece of ``size`` bytes; DataError for a damaged one, and for another piece's file."""
        path = self.path(number)
        with _reading(path), _opened(path, size) as file:
            if size >= _END.size + len(MAGIC):
                file.seek(size - _END.size)
                length, digest, magic = _END.unpack(file.read(_END.size))
                if magic == MAGIC and length <= size - _END.size:
                    file.seek(size - _END.size - length)
                    content = file.read(length)
                    if hashlib.sha256(content).digest() == digest:
                        record = cast(PieceRecord, parse_json(content, PieceRecord, where=str(path), error=DataError))
                        if record.number == number:
                            return record
                        raise DataError(
                            f"{path} holds piece {record.number}: delete it, and make piece {number} again with the "
                            "command that made it"
                        )
        raise _damaged(path)

    def batches(
        self, record: PieceRecord, size: int, *, keys: tuple[str, ...], dtype: str
    ) -> Iterator[dict[str, EncodedTexts]]:
        """Ids of each batch; DataError, possibly at the end alone, for a damaged piece."""
        path, digest, step = self.path(record.number), hashlib.sha256(), 3 * len(keys)
        kinds: tuple[np.dtype[Any], ...] = (np.dtype(dtype), LENGTH_DTYPE, OFFSET_DTYPE)
        with _reading(path), _opened(path, size) as file:
            digest.update(file.read(len(MAGIC)))
            for start in range(0, len(record.batches), step):
                texts = {}
                for key, counts in zip(keys, zip(*[iter(record.batches[start : start + step])] * 3)):
                    arrays = []
                    for kind, count in zip(kinds, counts):
                        content = file.read(kind.itemsize * count)
                        if len(content) < kind.itemsize * count:
                            raise _damaged(path)
                        digest.update(content)
                        arrays.append(np.frombuffer(content, kind))
                    texts[key] = EncodedTexts(*arrays)
                yield texts
        if digest.hexdigest() != record.sha256:
            raise _damaged(path)


class PieceWriter:
    """Writes the batches of one piece."""

    def __init__(self, file: IO[bytes], record: PieceRecord) -> None:
        self._file, self.record, self._digest = file, record, hashlib.sha256()
        self._write(MAGIC)

    def _write(self, content: bytes | memoryview) -> None:
        self._file.write(content)
        self._digest.update(content)

    def add(self, texts: Mapping[str, EncodedTexts]) -> None:
        """Append a batch."""
        for each in texts.values():
            arrays: tuple[NDArray[Any], ...] = (
                each.tokens,
                each.lengths.astype(LENGTH_DTYPE, copy=False),
                each.sequences.astype(OFFSET_DTYPE, copy=False),
            )
            for array in arrays:
                self._write(np.ascontiguousarray(array).data)
            self.record.batches += [len(each.tokens), len(each.lengths), len(each.sequences)]

    def end(self) -> None:
        """Append the record."""
        self.record.sha256 = self._digest.hexdigest()
        content = json.dumps(asdict(self.record)).encode()
        self._file.write(content)
        self._file.write(_END.pack(len(content), hashlib.sha256(content).digest(), MAGIC))
        self._file.flush()


def _written(file: IO[bytes], record: PieceRecord) -> Iterator[PieceWriter]:
    writer = PieceWriter(file, record)
    yield writer
    writer.end()


def _opened(path: AnyPath, size: int) -> IO[bytes]:
    if isinstance(path, RemotePath):
        return io.BufferedReader(RangeReader(path, size), BLOCK >> 4)
    return path.open("rb")


def _damaged(path: AnyPath) -> DataError:
    return DataError(f"{path} is damaged or no piece: delete it, and make it again with the command that made it")


@contextmanager
def _reading(path: AnyPath) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(f"{error.filename or path} cannot be read: {reason}", exit_code=exit_code_of(error)) from None
