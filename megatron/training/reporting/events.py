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

logger = logging.getLogger(__name__)

EVENTS_FILE = "events.jsonl"
"""In ``--save``, unless ``--log-json`` names another file."""
_NEEDED: dict[str, tuple[str, ...]] = {
    "steps": ("iteration", "iterations", "seconds", "losses"),
    "aside": ("what", "seconds"),
    "validation": ("where", "losses"),
    "sample": ("prompt", "text"),
    "numbers": ("values",),
    "rollback": ("iteration",),
    "end": ("state",),
}
EventName = Literal["start", "steps", "aside", "validation", "sample", "saved", "numbers", "rollback", "warning", "end"]


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
            file.write(text.encode())

    @override
    def close(self) -> None:
        """Do nothing: every event is written as it happens."""


def _finite(value: object) -> object:
    """``value`` with the numbers that JSON doesn't have as texts: ``"nan"``, ``"inf"``."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value


def read_events(path: Path) -> Iterator[Event]:
    """The events of a file; a line that a kill or a full disk has cut short is passed over.

    Raises DataError for a file that can't be read, or in which no line is an event.
    """
    found, lines = 0, 0
    try:
        with path.open("rb") as file:
            for line in file:
                lines += 1
                if (event := _event(line)) is not None:
                    found += 1
                    yield event
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror}") from None
    if lines and not found:
        raise DataError(f"{path} holds no events of a run: its {lines} lines are not those of --log-json")


def _event(line: bytes) -> Event | None:
    try:
        fields = json.loads(line)
        name, when = fields.pop("event"), float(fields.pop("time"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if not isinstance(name, str) or not math.isfinite(when) or not fields.keys() >= {*_NEEDED.get(name, ())}:
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
