"""Texts of the files that zero-shot tasks read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron.core.tokenizers.text_files import parse_line
from megatron.errors import DataError
from megatron.small_files import check_regular

FLAG = "--valid-data"
"""The flag that names the files, unless a caller says another."""


def read_text(path: Path, *, flag: str = FLAG) -> str:
    """All of a file that ``flag`` names; raises DataError for one that cannot be read."""
    check_regular(path, where=f"{flag} {path}", error=DataError)
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{flag} {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{flag} {path} is not UTF-8 (byte {error.start}); convert it first") from None


def json_lines(path: Path, *, key: str, flag: str = FLAG) -> Iterator[tuple[str, str]]:
    """Texts under ``key`` of a file's JSON lines, each after its file and line; DataError for a line without one."""
    for number, line in enumerate(read_text(path, flag=flag).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            document = parse_line(line)
        except DataError as error:
            raise DataError(f"{where} is {error}") from None
        if not isinstance(document, dict) or not isinstance(document.get(key), str):
            raise DataError(f"{where} has no text under {key!r}")
        yield where, document[key]


def read_documents(path: Path, *, key: str, flag: str = FLAG) -> Iterator[str]:
    """Texts of a file: one for each line of .jsonl and .json, the whole file for other suffixes."""
    if path.suffix in (".jsonl", ".json"):
        yield from (text for _, text in json_lines(path, key=key, flag=flag))
    else:
        yield read_text(path, flag=flag)
