"""JSON values of which one part has been replaced or left out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

GONE = object()
OTHERS: tuple[Any, ...] = ({}, [], None, "", 10**30, -1.5, "x", [[{"a": None}]], GONE)
Path = tuple[str | int, ...]


def paths(value: Any, path: Path = ()) -> Iterator[Path]:
    """Where each value inside a JSON value is."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield from paths(each, (*path, key))


def replaced(value: Any, path: Path, by: Any) -> Any:
    """A JSON value with what is at ``path`` replaced, or left out."""
    changed = value.copy()
    if len(path) > 1:
        changed[path[0]] = replaced(value[path[0]], path[1:], by)
    elif by is GONE:
        del changed[path[0]]
    else:
        changed[path[0]] = by
    return changed
