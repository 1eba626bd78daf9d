"""The events of a run as JSON lines: what reports, dashboards and the account of lost time are made of."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from typing_extensions import override

from megatron.errors import DataError
from megatron.small_files import check_regular

logger = logging.getLogger(__name__)

EVENTS_FILE = "events.jsonl"
"""In ``--save``, unless ``--log-json`` names another file."""
_LONGEST_LINE = 1 << 24  # bytes; a line of a run on thousands of ranks is shorter
_NEWEST = 1e11  # seconds: a year that calendars have
EventName = Literal[
    "start",
    "steps",
    "aside",
    "validation",
    "sample",
    "saved",
    "copied",
    "save-failed",
    "numbers",
    "rollback",
    "warning",
    "end",
]


@dataclass(frozen=True)
class Event:
    """Something that happened in a run.

    ``time``: seconds since 1970. ``fields``: numbers, texts, lists and mappings.
    """

    name: EventName
    time: float
    fields: Mapping[str, Any] = field(default_factory=dict)


class Observer(Protocol):
    """Sees the events of a run as they happen, on one rank."""

    def see(self, event: Event) -> None:
        """Take note of an event."""

    def close(self) -> None:
        """Write what is left; nothing happens any more."""


class EventLog(Observer):
    """Appends each event as a line to ``path``.

    Nothing is written before the first step, evaluation or save, so that a launch whose settings are refused leaves no
    file. A disk that fails costs a warning, not the run.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._held = path, list[str]()
        self._trains, self._warned = False, False

    @override
    def see(self, event: Event) -> None:
        line = {"time": round(event.time, 3), "event": event.name, **event.fields}
        self._held.append(json.dumps(_finite(line), ensure_ascii=False, allow_nan=False) + "\n")
        self._trains |= event.name not in ("start", "warning", "end")
        if not self._trains:
            return
        try:
            self._append("".join(self._held))
        except OSError as error:
            if not self._warned:
                logger.warning("%s can't be written (%s): training continues", self._path, error.strerror)
            self._warned = True
            return
        self._held.clear()

    def _append(self, text: str) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab+") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":  # the run before was killed in the middle of a line
                    file.write(b"\n")
            file.write(text.encode(errors="backslashreplace"))  # paths may have halves of pairs, which no file takes

    @override
    def close(self) -> None:
        """Do nothing: every event is written as it happens."""


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _is_number(value: object) -> bool:
    """Whether ``float`` takes it: a number, or one of the words of ``_finite``."""
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 1 << 1000
    return isinstance(value, float) or value in ("nan", "inf", "-inf")


def _is_seconds(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < _NEWEST


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _are_numbers(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))


def _are_sizes(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_whole, value.values()))


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


_KINDS: dict[str, Callable[[object], bool]] = {
    "iteration": _is_whole,
    "iterations": _is_whole,
    "attempt": _is_whole,
    "seconds": _is_seconds,
    "setup_seconds": _is_seconds,
    "losses": _are_numbers,
    "values": _are_numbers,
    "parameters": _is_whole,
    "layout": _are_sizes,
    "settings": _are_texts,
    "data": _are_texts,
    "what": _is_text,
    "where": _is_text,
    "data_set": _is_text,
    "prompt": _is_text,
    "text": _is_text,
    "state": _is_text,
}
"""How readers check a field, in whatever event."""
OF_STEPS = ("learning_rate", "grad_norm", "tokens_per_second", "seconds_per_iteration", "tflops_per_device", "mfu")
"""Numbers of steps that have a curve, where they are known."""
_NEEDED: dict[str, tuple[str, ...]] = {
    "steps": ("iteration", "iterations", "seconds", "losses"),
    "aside": ("what", "seconds"),
    "validation": ("where", "losses"),
    "sample": ("prompt", "text"),
    "numbers": ("values",),
    "copied": ("iteration",),
    "save-failed": ("iteration", "attempt", "text"),
    "rollback": ("iteration",),
    "end": ("state",),
}


def _finite(value: object) -> object:
    """``value`` with the numbers that JSON doesn't have as texts: ``"nan"``, ``"inf"``."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value


MOVE_IT_AWAY = "move it away, or name another file with --log-json"
"""What a run does about a file that can't be its own."""


def read_events(path: Path, *, remedy: str = MOVE_IT_AWAY) -> Iterator[Event]:
    """The events of a file; a line that a kill or a full disk has cut short, or whose fields are of other types, is
    passed over.

    Raises DataError, with ``remedy``, for a file that can't be read, or in which no line is an event.
    """
    check_regular(path, where=str(path), error=DataError)
    found, lines = 0, 0
    try:
        with path.open("rb") as file:
            while line := file.readline(_LONGEST_LINE):  # of a longer one no part is an event
                lines += 1
                if (event := _event(line)) is not None:
                    found += 1
                    yield event
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror}; {remedy}") from None
    if lines and not found:
        raise DataError(
            f"{path} holds no events of a run: its lines, {lines} in all, are not those of --log-json; {remedy}"
        )


def _event(line: bytes) -> Event | None:
    try:
        fields = json.loads(line)
        name, when = fields.pop("event"), float(fields.pop("time"))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    if not isinstance(name, str) or not 0 <= when < _NEWEST or not fields.keys() >= {*_NEEDED.get(name, ())}:
        return None
    if not all(is_kind(fields[key]) for key, is_kind in _KINDS.items() if key in fields):
        return None
    if name == "steps" and not all(_is_number(fields[key]) for key in OF_STEPS if fields.get(key) is not None):
        return None
    return Event(cast("EventName", name), when, fields)


class Observers:
    """The observers of a run on this rank; one that fails is dropped with a warning."""

    def __init__(self, *observers: Observer, clock: Callable[[], float] = time.time) -> None:
        self._observers, self._clock = list(observers), clock

    def __bool__(self) -> bool:
        return bool(self._observers)

    def tell(self, name: EventName, **fields: object) -> None:
        """Pass an event with the time of now to all observers."""
        event = Event(name, self._clock(), fields)
        self._each(lambda observer: observer.see(event))

    def close(self) -> None:
        """Close all."""
        self._each(lambda observer: observer.close())

    def _each(self, work: Callable[[Observer], None]) -> None:
        for observer in list(self._observers):
            try:
                work(observer)
            except Exception as error:  # a lost service, a library's own error: no report is worth a run
                self._observers.remove(observer)
                logger.warning("%s failed (%s): training continues without it", type(observer).__name__, error)
