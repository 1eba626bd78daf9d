"""Small structured files, JSON and YAML, from any author: bounded in size, depth and digits, and checked against types.

Each mistake is one sentence that names the file and the key. Types are annotations, as dataclasses have
them; ``Annotated[float, Between(0, 1)]`` has bounds as well.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import stat
import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, Union, get_args, get_origin, get_type_hints

from typing_extensions import override

from megatron.errors import MegatronError, enumeration

SETTINGS_BYTES, VOCABULARY_BYTES = 1 << 24, 1 << 28
"""Largest files of settings, and of vocabularies."""
MOST_DEPTH, MOST_DIGITS = 100, 100
_MOST_SHOWN = 60
_GIVEN_BY_SHELLS = re.compile(r"/dev/(stdin|fd/[0-9]+|null|tty)|/proc/(self|[0-9]+)/fd/.+")
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "null"}


@dataclasses.dataclass(frozen=True)
class Between:
    """Bounds of a number, both included."""

    least: float
    most: float


class OpenedByPath(Protocol):
    """A path on a disk or in object storage."""

    def open(self, mode: Literal["rb"], /) -> Any:
        """The file, open."""
        ...


class AnyFile(Protocol):
    """A path that knows whether it is a file's."""

    def is_file(self) -> bool:
        """Whether there is a file."""
        ...


def read_json(
    path: OpenedByPath,
    kind: Any = Any,
    *,
    error: type[MegatronError],
    where: str | None = None,
    most_bytes: int = SETTINGS_BYTES,
) -> Any:
    """The value in the file ``path``, as ``kind``. Raises OSError where it can't be read, and ``error`` for all else.

    ``where``: what messages call the file, in place of its path.
    """
    where = where or str(path)
    return parse_json(read_bytes(path, where=where, error=error, most_bytes=most_bytes), kind, where=where, error=error)


def read_bytes(
    path: OpenedByPath, *, where: str, error: type[MegatronError], most_bytes: int = SETTINGS_BYTES
) -> bytes:
    """The content of a small file; raises OSError where it can't be read, and ``error`` where it is too large."""
    check_regular(path, where=where, error=error)
    with path.open("rb") as file:
        content: bytes = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        most = f"{most_bytes >> 20} MiB" if most_bytes >= 1 << 20 else f"{most_bytes >> 10} KiB"
        raise error(f"{where} is larger than {most}, the most that is read")
    return content


def check_regular(path: object, *, where: str, error: type[MegatronError]) -> None:
    """Raise ``error`` for a named pipe, a socket or a device, of which a read may never end.

    What a shell gives may be read: ``/dev/stdin``, and ``/dev/fd/63`` of ``<(…)``. Folders and missing files are left
    to what opens them.
    """
    with suppress(OSError):
        mode = path.stat().st_mode if isinstance(path, Path) else stat.S_IFREG
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
            return
        if any(map(_GIVEN_BY_SHELLS.fullmatch, (os.path.abspath(str(path)), os.path.realpath(str(path))))):
            return
        found = "pipe" if stat.S_ISFIFO(mode) else "socket" if stat.S_ISSOCK(mode) else "device"
        raise error(f"{where} is a {found}, not a regular file: name a file with its content")


def has_file(path: AnyFile, *, error: type[MegatronError]) -> bool:
    """Whether there is a file at ``path``, as ``is_file`` says; raises ``error`` for a pipe, a socket or a device."""
    check_regular(path, where=str(path), error=error)
    return path.is_file()


def read_text(path: OpenedByPath, *, where: str, error: type[MegatronError], most_bytes: int = SETTINGS_BYTES) -> str:
    """The file's text, decoded from UTF-8, with or without a byte order mark."""
    return _text(read_bytes(path, where=where, error=error, most_bytes=most_bytes), where, error)


def parse_json(text: str | bytes, kind: Any = Any, *, where: str, error: type[MegatronError]) -> Any:
    """The value of a JSON text, as ``kind``; raises ``error``."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            seen = set[str]()
            repeated = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise error(f"{where} has the key {shown(repeated)} twice")
        return found

    def whole(digits: str) -> int:
        if len(digits) > MOST_DIGITS:
            raise error(f"{where} has a number of {len(digits):,} digits; at most {MOST_DIGITS} are read")
        return int(digits)

    try:
        value = json.loads(_text(text, where, error), object_pairs_hook=unique, parse_int=whole)
    except json.JSONDecodeError as damage:
        raise error(f"{where}:{damage.lineno} is not JSON: {damage.msg}") from None
    except RecursionError:
        raise _too_deep(where, error) from None
    _check_depth(value, where, error)
    return as_kind(value, kind, where=where, error=error)


def parse_yaml(text: str | bytes, *, where: str, error: type[MegatronError]) -> Any:
    """The value of a YAML text without aliases; raises ``error``, and ImportError without PyYAML.

    YAML takes 010 for eight, 1:30 for ninety and 2024-01-01 for a date: such values are refused.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        depth = 0

        @override
        def compose_node(self, parent: Any, index: Any) -> Any:
            """One node, unless it is an alias or too deep."""
            if self.check_event(yaml.AliasEvent):
                event = self.get_event()  # type: ignore[no-untyped-call]
                raise error(f"{where}:{_line(event.start_mark)} has the alias *{event.anchor}; write out its value")
            if self.depth > MOST_DEPTH:
                raise _too_deep(where, error)
            self.depth += 1
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

    try:
        loader = Loader(_text(text, where, error))
        node = loader.get_single_node()
        for scalar in _scalars(node, where, error):
            _check_scalar(scalar, where, error)
        return None if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as damage:
        raise error(f"{where}:{_line(damage.problem_mark)} is not YAML: {damage.problem}") from None
    except MegatronError:
        raise
    except Exception as damage:  # of wrong words PyYAML raises almost anything
        raise error(f"{where} is not YAML: {str(damage).partition(chr(10))[0]}") from None


def _line(mark: Any) -> int:
    return mark.line + 1 if mark else 1


def _scalars(node: Any, where: str, error: type[MegatronError]) -> Iterator[Any]:
    """The words of a tree of nodes, whose mappings have each key once."""
    if node is None or isinstance(node.value, str):
        yield from [] if node is None else [node]
        return
    seen: set[str] = set()
    for each in node.value:
        parts = each if isinstance(each, tuple) else (each,)
        if isinstance(each, tuple) and isinstance(each[0].value, str):
            if each[0].value in seen:
                raise error(f"{where}:{_line(each[0].start_mark)} has the key {shown(each[0].value)} twice")
            seen.add(each[0].value)
        for part in parts:
            yield from _scalars(part, where, error)


def _check_scalar(node: Any, where: str, error: type[MegatronError]) -> None:
    kind, text, line = node.tag.rpartition(":")[2], node.value, _line(node.start_mark)
    if kind == "int" and len(text) > MOST_DIGITS:
        raise error(f"{where}:{line} has a number of {len(text):,} digits; at most {MOST_DIGITS} are read")
    if kind in ("int", "float") and re.match(r"[-+]?0[0-9]|.*:", text):
        raise error(f"{where}:{line} has {text}, which YAML reads in another base; write the number in decimals")
    if kind == "timestamp":
        raise error(f"{where}:{line} has {text}, which YAML reads as a date; put it in quotes")


def as_kind(value: Any, kind: Any, *, where: str, error: type[MegatronError]) -> Any:
    """``value``, which JSON or YAML gave, as ``kind``: a type, or a dataclass made of its fields; raises ``error``.

    A whole number is a number as well; true isn't one; numbers are finite.
    """
    return _Reader(where, error).read(value, kind, "")


def check_kinds(value: Mapping[str, Any], kinds: Mapping[str, Any], *, where: str, error: type[MegatronError]) -> None:
    """Raise ``error`` for a setting that is there, isn't null and isn't of its kind; other settings may be anything."""
    reader = _Reader(where, error)
    for name, kind in kinds.items():
        if value.get(name) is not None:
            reader.read(value[name], kind, name)


@dataclasses.dataclass(frozen=True)
class _Reader:
    where: str
    error: type[MegatronError]

    def read(self, value: Any, kind: Any, key: str) -> Any:
        origin, arguments = get_origin(kind), get_args(kind)
        if kind is Any:
            return value
        if origin is Annotated:
            found, (bounds,) = self.read(value, arguments[0], key), arguments[1:]
            if not bounds.least <= found <= bounds.most:
                raise self.wrong(value, f"{_words(arguments[0])} from {bounds.least} to {bounds.most:,}", key)
            return found
        if origin in (Union, types.UnionType):
            fitting = [each for each in arguments if _is_of(value, each)]
            if not fitting:
                raise self.wrong(value, enumeration(dict.fromkeys(map(_words, arguments)), "or"), key)
            return self.read(value, fitting[0], key)
        if not _is_of(value, kind):
            raise self.wrong(value, _words(kind), key)
        if dataclasses.is_dataclass(kind):
            return self.fields(value, kind, key)
        if origin in (dict, Mapping):
            return {name: self.read(each, arguments[1], _joined(key, name)) for name, each in value.items()}
        if origin in (list, tuple):
            items = [self.read(each, arguments[0], f"{key}[{number}]") for number, each in enumerate(value)]
            return items if origin is list else tuple(items)
        return float(value) if kind is float else value

    def fields(self, value: Mapping[str, Any], kind: Any, key: str) -> Any:
        hints, fields = get_type_hints(kind, include_extras=True), dataclasses.fields(kind)
        names = {each.name for each in fields}
        for unknown in value.keys() - names:
            raise self.error(f"{self.where} has {_joined(key, unknown)}, which is none of {', '.join(sorted(names))}")
        for each in fields:
            if each.name not in value and each.default is each.default_factory is dataclasses.MISSING:
                raise self.error(f"{self.where} lacks {_joined(key, each.name)}")
        return kind(**{name: self.read(each, hints[name], _joined(key, name)) for name, each in value.items()})

    def wrong(self, value: Any, expected: str, key: str) -> MegatronError:
        where = f"{self.where}: {key} is" if key else f"{self.where} is"
        return self.error(f"{where} {shown(value)}; expected {expected}")


def _is_of(value: Any, kind: Any) -> bool:
    """Whether a value is of the kind, its items and fields aside."""
    origin = get_origin(kind) or kind
    if origin is Annotated:
        return _is_of(value, get_args(kind)[0])
    if origin is Any:
        return True
    if origin is Literal:
        return value in get_args(kind)
    if dataclasses.is_dataclass(origin) or origin is Mapping:
        return isinstance(value, dict)
    if origin in (list, tuple):
        return isinstance(value, list)
    if origin is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return type(value) is origin


def _words(kind: Any) -> str:
    origin = get_origin(kind) or kind
    if origin is Literal:
        return enumeration(map(shown, get_args(kind)), "or")
    if origin is Annotated:
        return _words(get_args(kind)[0])
    return _WORDS.get(origin, "a list" if origin in (list, tuple) else "an object")


def _joined(key: str, name: str) -> str:
    part = name if re.fullmatch(r"[\w./-]{1,60}", name) else shown(name)
    return f"{key}.{part}" if key else part


def shown(value: Any) -> str:
    """A value as JSON has it, or its beginning."""
    if isinstance(value, (dict, list)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    text = json.dumps(value, default=str)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def _check_depth(value: Any, where: str, error: type[MegatronError]) -> None:
    level: list[Any] = [[value]]  # what is at one depth; of what it holds, only what may hold more
    for _ in range(MOST_DEPTH + 1):
        parts = (part for each in level for part in (each.values() if isinstance(each, dict) else each))
        level = [part for part in parts if isinstance(part, (dict, list))]
        if not level:
            return
    raise _too_deep(where, error)


def _too_deep(where: str, error: type[MegatronError]) -> MegatronError:
    return error(f"{where} is nested more than {MOST_DEPTH} levels deep")


def _text(content: str | bytes, where: str, error: type[MegatronError]) -> str:
    try:
        return content if isinstance(content, str) else content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise error(f"{where} is not UTF-8 text") from None
