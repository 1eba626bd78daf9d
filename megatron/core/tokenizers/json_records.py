"""Objects of files, one after the other: a line of JSON each, one JSON list, or a row of Parquet each."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

from megatron.core.tokenizers.input_files import PARQUET_ENDING
from megatron.core.tokenizers.line_batches import LineBatch
from megatron.core.tokenizers.text_files import read_batches, read_record
from megatron.errors import DataError

_SPACE = " \t\r\n"


class Record(NamedTuple):
    """A JSON object, or the reason why there is none, and the line where it begins."""

    path: str
    line: int
    value: dict[str, Any] | DataError


def read_records(paths: Sequence[str], *, columns: Collection[str]) -> Iterator[Record]:
    """The objects of all files, in order. A file that begins with ``[`` is one list, whose text is held in memory.

    ``columns``: those of Parquet files that are read, as far as a file has them. Raises DataError for a file that
    cannot be read, and for damage within a list.
    """
    for path in paths:
        keys = list[str]()
        if path.endswith(PARQUET_ENDING):
            from megatron.core.tokenizers.parquet import column_names

            names = column_names(path)
            keys = [name for name in names if name in columns]
            if not keys:
                raise DataError(f"--input {path} has no conversations: its columns are {', '.join(names[:8])}.")
        batches = read_batches([path], keys=keys)
        first = next(batches, None)
        if first is not None and first.data.lstrip().startswith(b"["):
            yield from _items(path, b"".join(batch.data for batch in (first, *batches)))
        elif first is not None:
            yield from _lines(chain([first], batches))


def _lines(batches: Iterable[LineBatch]) -> Iterator[Record]:
    for batch in batches:
        for number, line in enumerate(batch.data.removesuffix(b"\n").split(b"\n"), batch.first_line):
            try:
                yield Record(batch.path, number, read_record(line))
            except DataError as error:
                yield Record(batch.path, number, error)


def _items(path: str, content: bytes) -> Iterator[Record]:
    """The objects of a list, parsed one at a time."""
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: byte 0x{content[error.start]:02x} at {error.start + 1}") from None
    decoder, line, counted = json.JSONDecoder(), 1, 0
    at = _after_space(text, text.index("[") + 1)
    while text[at : at + 1] not in ("]", ""):
        line, counted = line + text.count("\n", counted, at), at
        try:
            value, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}:{error.lineno}: an item of the list is not JSON: {error.msg}") from None
        except (ValueError, RecursionError):
            why = "is nested too deeply, or has a number of too many digits"
            raise DataError(f"{path}:{line}: an item of the list {why}") from None
        kind = "a list" if isinstance(value, list) else json.dumps(value)[:20]
        yield Record(path, line, value if isinstance(value, dict) else DataError(f"{kind} instead of a JSON object"))
        at = _after_space(text, at)
        if text[at : at + 1] == ",":
            at = _after_space(text, at + 1)
        elif text[at : at + 1] != "]":
            break
    if text[at : at + 1] != "]" or _after_space(text, at + 1) < len(text):
        line += text.count("\n", counted, at)
        raise DataError(f"{path}:{line}: the list ends here, but the file goes on, or is cut short; copy it again")


def _after_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at
