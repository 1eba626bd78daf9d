"""Settings from files: ``@file`` with words as on a command line, ``--config`` with YAML or JSON."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.errors import ConfigError
from megatron.small_files import parse_json, parse_yaml, read_text


@dataclass(frozen=True)
class Word:
    """One word of a command line and where it stood: ``flag``, or ``FILE:LINE`` of an ``@file``."""

    text: str
    source: str

    @property
    def is_flag(self) -> bool:
        """Whether the word starts like a flag, also with one dash or a typographic one; negative numbers do not."""
        return bool(re.match(r"--|[-–—]{1,2}[A-Za-z]", self.text))


def words_of(argv: Iterable[str]) -> Iterator[Word]:
    """The words of a command line, each ``@file`` replaced by the file's words; raises ConfigError for a bad file."""
    for text in argv:
        if text.startswith("@"):
            yield from _words_of_file(Path(text[1:]), ())
        else:
            yield Word(text, "flag")


def _words_of_file(path: Path, including: tuple[Path, ...]) -> Iterator[Word]:
    """Words of shell-like lines: quotes, comments and a backslash at the end of a line work as in a shell."""
    if path in including:
        raise ConfigError(f"@{path} includes itself: {' -> '.join(map(str, (*including, path)))}")
    pending, first = "", 0
    for number, line in enumerate(_read(path, "@").splitlines(), start=1):
        first = first if pending else number
        if line.endswith("\\") and not line.lstrip().startswith("#"):
            pending += line[:-1] + " "
            continue
        yield from _words_of_line(pending + line, path, first, including)
        pending = ""
    yield from _words_of_line(pending, path, first, including)


def _words_of_line(line: str, path: Path, number: int, including: tuple[Path, ...]) -> Iterator[Word]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:
        raise ConfigError(f"{path}:{number}: {str(error).lower()}; quotes must be closed on the same line") from None
    for text in words:
        if text.startswith("@"):
            yield from _words_of_file(path.parent / text[1:], (*including, path))
        else:
            yield Word(text, f"{path}:{number}")


def read_settings(path: str, *, flag: str = "--config") -> dict[str, Any]:
    """The top-level mapping of the YAML or JSON file that ``flag`` names; raises ConfigError with file and line."""
    where = f"{flag} {path}"
    text = _read(Path(path), f"{flag} ")
    try:
        parse = parse_json if path.endswith(".json") else parse_yaml
        values = parse(text, where=where, error=ConfigError)
    except ImportError:
        raise ConfigError(
            f"{where} needs PyYAML: pip install pyyaml, or write the settings as JSON into a file named *.json"
        ) from None
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise ConfigError(f"{flag} {path} holds a {type(values).__name__}; it must be a mapping of settings to values")
    return {str(key): value for key, value in values.items()}


def _read(path: Path, prefix: str) -> str:
    try:
        return read_text(path, where=f"{prefix}{path}", error=ConfigError)
    except OSError as error:
        raise ConfigError(f"{prefix}{path} cannot be read: {error.strerror}") from None
