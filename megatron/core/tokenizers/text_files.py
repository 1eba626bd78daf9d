"""Files of text: found, decompressed, cut into batches of whole lines, and read line by line as JSON.

Lines are numbered from 1, and errors name them as ``FILE:LINE``.
"""

from __future__ import annotations

import bisect
import codecs
import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from typing_extensions import override

from megatron.core.tokenizers.compressed import DamagedStreamError, decompressed
from megatron.core.tokenizers.input_files import PARQUET_ENDING, STDIN, opened, size_of
from megatron.core.tokenizers.line_batches import START, LineBatch, Position
from megatron.errors import DataError, exit_code_of

BATCH_BYTES = 1 << 19

_scan: Callable[[str, int], tuple[Any, int]] = vars(json.JSONDecoder())["scan_once"]


@dataclass(frozen=True)
class BadLine:
    """A line without a document, and why."""

    path: str
    line: int
    reason: str

    @override
    def __str__(self) -> str:
        return f"{'standard input' if self.path == STDIN else self.path}:{self.line}: {self.reason}"


@dataclass
class Documents:
    """The texts of a batch, ``texts[key][i]`` from line ``lines[i]``, and its bad lines in order."""

    path: str
    texts: dict[str, list[str]]
    lines: list[int] = field(default_factory=list)
    bad: list[BadLine] = field(default_factory=list)

    def reject(self, line: int, reason: str) -> None:
        """Note a line that holds no document."""
        bisect.insort(self.bad, BadLine(self.path, line, reason), key=lambda bad: bad.line)

    def drop_unless(self, check: Callable[[str], object]) -> None:
        """Reject each document of which ``check`` refuses a text with a DataError."""
        for index in reversed(range(len(self.lines))):
            try:
                for texts in self.texts.values():
                    check(texts[index])
            except DataError as error:
                self.reject(self.lines.pop(index), str(error))
                for texts in self.texts.values():
                    del texts[index]


def read_batches(
    paths: Sequence[str],
    *,
    keys: Sequence[str] = (),
    start: Position = START,
    stop: Position | None = None,
    batch_bytes: int = BATCH_BYTES,
) -> Iterator[LineBatch]:
    """Lines of all files from ``start`` up to ``stop``, in batches of about ``batch_bytes``, decompressed.

    Endings are .gz, .bz2, .xz and .zst; of a .parquet file each row is a line of JSON with the columns ``keys``. Keeps
    one batch in memory; a line longer than that is a batch of its own. A byte order mark is left out.
    Raises DataError when a file cannot be read or its compression is damaged.
    """
    end = Position(len(paths)) if stop is None else stop
    finished = 0 if stop is not None else sum(_size(path) for path in paths[: start.file])
    for number, path in enumerate(paths[start.file : end.file + 1], start.file):
        begin = start if number == start.file else Position(number)
        last = end if number == end.file else None
        if begin == end:
            return
        if path.endswith(PARQUET_ENDING):
            from megatron.core.tokenizers.parquet import read_rows

            batches = read_rows(path, begin, keys=keys, batch_bytes=batch_bytes, stop=last.line if last else None)
        else:
            batches = _read_lines(path, begin, batch_bytes=batch_bytes, stop=last.offset if last else None)
        for batch in batches:
            yield replace(batch, bytes_read=finished + batch.bytes_read)
        finished += _size(path) if last is None else 0


def _read_lines(path: str, begin: Position, *, batch_bytes: int, stop: int | None) -> Iterator[LineBatch]:
    next_line, offset = begin.line, begin.offset
    try:
        with opened(path, stop=stop) as raw, decompressed(path, raw) as stream:
            if offset and stream.seekable():
                stream.seek(offset)
            elif offset:  # compressed data must be read up to there
                for start in range(0, offset, BATCH_BYTES):
                    stream.read(min(offset - start, BATCH_BYTES))
            while data := stream.read(batch_bytes if stop is None else min(batch_bytes, stop - offset)):
                if not data.endswith(b"\n"):
                    data += stream.readline()
                first_line, next_line = next_line, next_line + data.count(b"\n")
                is_first, offset = not offset, offset + len(data)
                end = Position(begin.file, next_line, offset)
                if is_first:
                    data = data.removeprefix(codecs.BOM_UTF8)
                yield LineBatch(path, first_line, data, raw.tell() if raw.seekable() else 0, end)
    except (OSError, DamagedStreamError) as error:
        if isinstance(error, OSError):
            reason, code = error.strerror or str(error), exit_code_of(error)
        else:
            reason = f"{error}; the file is damaged or cut short, copy it again (or rename it, if it isn't compressed)"
            code = None
        raise DataError(
            f"--input {path} cannot be read after line {next_line - 1}: {reason}.", exit_code=code
        ) from None


def _size(path: str) -> int:
    try:
        return size_of(path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(f"--input {path} cannot be read: {reason}.", exit_code=exit_code_of(error)) from None


def read_documents(batch: LineBatch, keys: Sequence[str]) -> Documents:
    """The texts under ``keys`` of each line's JSON object; a line that lacks one of them is bad for all."""
    documents = Documents(batch.path, {key: [] for key in keys})
    lines = batch.data.removesuffix(b"\n").split(b"\n")
    for number, line in enumerate(lines, batch.first_line):
        try:
            record = read_record(line)
            found = [_text_of(record, key) for key in keys]
        except DataError as error:
            documents.reject(number, str(error))
            continue
        documents.lines.append(number)
        for key, text in zip(keys, found):
            documents.texts[key].append(text)
    return documents


def read_plain_lines(batch: LineBatch) -> Documents:
    """Every line of a text file as a text, with its line end; empty lines are texts too."""
    documents = Documents(batch.path, {"text": []})
    for number, line in enumerate(io.BytesIO(batch.data), batch.first_line):
        try:
            documents.texts["text"].append(_decode(line))
            documents.lines.append(number)
        except DataError as error:
            documents.reject(number, str(error))
    return documents


def read_record(line: bytes) -> dict[str, Any]:
    """The JSON object of one line; raises DataError with the reason."""
    text = _decode(line)
    try:
        record, end = _scan(text, 0)  # as json.loads does for a text without space around it, in half the time
    except (ValueError, StopIteration, RecursionError):
        record, end = None, -1  # the slower parse_line gives the reason
    if end == len(text) and isinstance(record, dict):
        return record
    record = parse_line(text)
    if not isinstance(record, dict):
        raise DataError(f"{_json_kind(record)} instead of a JSON object")
    return record


def parse_line(line: str) -> Any:
    """The JSON value of a line; raises DataError with the reason."""
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        if not line.strip():
            raise DataError("the line is empty") from None
        spread = line.lstrip().startswith("[") or line.strip() == "{"  # an array, or an object over several lines
        hint = "; each line must be an object of its own, without brackets or commas around it" if spread else ""
        raise DataError(f"not JSON: {error.msg} at column {error.colno}{hint}") from None
    except ValueError:
        raise DataError(f"not readable: a number has more than {sys.get_int_max_str_digits():,} digits") from None
    except RecursionError:
        raise DataError("not readable: the JSON is nested too deeply") from None


def _text_of(record: dict[str, Any], key: str) -> str:
    try:
        value = record[key]
    except KeyError:
        has = f"its keys are {', '.join(list(record)[:8])}" if record else "the object is empty"
        raise DataError(f'no key "{key}" ({has})') from None
    if not isinstance(value, str):
        raise DataError(f'{_json_kind(value)} under "{key}" instead of a string')
    return value


def _decode(line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8: byte 0x{line[error.start]:02x} at column {error.start + 1}") from None


def _json_kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
