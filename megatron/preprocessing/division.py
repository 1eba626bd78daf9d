"""The input divided into pieces that machines encode apart: a function of the input alone, however many machines.

A piece is a stretch of all files end to end. It begins at a line of a plain file, at a group of rows of a Parquet file,
or at a compressed file, which can't be entered in its middle.
"""

from __future__ import annotations

import bisect
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from megatron.core.tokenizers import compressed
from megatron.core.tokenizers.input_files import PARQUET_ENDING, STDIN, InputFile, opened
from megatron.core.tokenizers.line_batches import Position
from megatron.errors import ConfigError, DataError, exit_code_of

_PIECES = 1000  # as many as make waiting for the last one short, unless they are smaller or larger than these
_SMALLEST, _LARGEST = 16 << 20, 1 << 30
_MOST_PIECES = 1_000_000
_COUNTED_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Piece:
    """Number ``number`` of the pieces, which are counted from 0: the lines from ``start`` up to ``stop``."""

    number: int
    start: Position
    stop: Position


@dataclass(frozen=True)
class Division:
    """Pieces of about ``piece_bytes`` bytes as the files lie on the disk."""

    files: Sequence[InputFile]
    piece_bytes: int

    @cached_property
    def count(self) -> int:
        """Number of pieces."""
        return max(1, -(-self._starts[-1] // self.piece_bytes))

    @cached_property
    def _starts(self) -> list[int]:
        """Bytes before each file, and of all."""
        return [0, *accumulate(each.size or 0 for each in self.files)]

    @cached_property
    def digest(self) -> str:
        """What changes with the input."""
        facts = [[each.path, each.source, each.size, each.version] for each in self.files]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def piece(self, number: int) -> Piece:
        """One piece; reads the file a little where it is cut. Raises DataError where that fails."""
        return Piece(number, self._cut(number), self._cut(number + 1))

    def name(self, number: int) -> str:
        """Where a piece begins, for people."""
        start = number * self.piece_bytes
        file = bisect.bisect_right(self._starts, start, hi=len(self.files)) - 1
        return f"{self.files[file].path} from byte {start - self._starts[file]:,} on"

    def _cut(self, number: int) -> Position:
        """The first place after ``number`` pieces at which one may begin."""
        if number == 0 or number >= self.count:
            return Position(len(self.files) if number else 0)
        target = number * self.piece_bytes
        file = bisect.bisect_left(self._starts, target)  # the first that begins there or after it
        if self._starts[file] == target:
            return Position(file)
        path, offset = self.files[file - 1].path, target - self._starts[file - 1]
        if path.endswith(compressed.ENDINGS):
            return Position(file)
        return (_row_cut if path.endswith(PARQUET_ENDING) else _line_cut)(path, file - 1, offset)


def divide(files: Sequence[InputFile], *, piece_bytes: int | None = None) -> Division:
    """The pieces of an input: about a thousand, of 16 MiB to 1 GiB, unless ``piece_bytes`` says their size."""
    if any(each.size is None for each in files):
        pipe = next(each.path for each in files if each.size is None)
        named = "standard input (--input -)" if pipe == STDIN else f"--input {pipe}"
        raise ConfigError(f"{named} can be read only once and by one machine: give files, or a folder for the output")
    total = sum(each.size or 0 for each in files)
    division = Division(files, piece_bytes or min(max(total // _PIECES, _SMALLEST), _LARGEST))
    if division.count > _MOST_PIECES:
        raise ConfigError(
            f"--piece-megabytes divides the input into {division.count:,} pieces, of at most {_MOST_PIECES:,}; give "
            f"{total / _MOST_PIECES / (1 << 20):.1g} or more"
        )
    return division


def _line_cut(path: str, file: int, offset: int) -> Position:
    """The first line that begins at ``offset`` or after it."""
    try:
        with opened(path, stop=offset) as raw:
            raw.seek(offset - 1)
            rest = raw.readline()
            at = offset - 1 + len(rest)
            at_end = not raw.peek(1)
    except OSError as error:
        raise DataError(f"--input {path} cannot be read: {error.strerror}.", exit_code=exit_code_of(error)) from None
    return Position(file + 1) if at_end else Position(file, 1, at)


def _row_cut(path: str, file: int, offset: int) -> Position:
    """The first group of rows whose predecessors have ``offset`` bytes or more."""
    from megatron.core.tokenizers.parquet import row_groups

    size, row = 0, 0
    for group_bytes, rows in row_groups(path):
        if size >= offset:
            return Position(file, row + 1)
        size, row = size + group_bytes, row + rows
    return Position(file + 1)


def lines_before(path: str, start: Position) -> int:
    """How many lines a file has before a piece that begins in its middle. Raises DataError as reading does."""
    if not start.offset:
        return start.line - 1
    lines, left = 0, start.offset
    try:
        with opened(path, stop=start.offset) as raw:
            while data := raw.read(min(_COUNTED_AT_ONCE, left)):
                lines, left = lines + data.count(b"\n"), left - len(data)
    except OSError as error:
        raise DataError(f"--input {path} cannot be read: {error.strerror}.", exit_code=exit_code_of(error)) from None
    return lines
