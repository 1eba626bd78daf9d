"""Stop strings: where a text ends, wherever tokens begin and end."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


class StopStrings:
    """Finds stop strings in a text that comes in pieces, and holds back an end that may become one.

    A text ends before the stop string that is complete first, after it with ``include_string``. So the result doesn't
    depend on how the text is cut into pieces. ``matched``: the stop string that was found.
    """

    def __init__(self, strings: Sequence[str], *, include_string: bool = False) -> None:
        self._strings = tuple(strings)
        self._sorted = sorted(strings)
        self._longest = max(map(len, strings), default=0)
        self._include = include_string
        self._held = ""
        self.matched: str | None = None

    def add(self, text: str, *, may_stop: bool = True) -> str:
        """Add ``text``. Returns the text that can be shown.

        Without ``may_stop`` no stop string may end in it, but one may begin. After a match nothing is shown.
        """
        if self.matched is not None:
            return ""
        num_held = len(self._held)
        text, self._held = self._held + text, ""
        found = [
            (start + len(each), start, each)
            for each in self._strings
            if (start := text.find(each, max(0, num_held + 1 - len(each)))) >= 0  # it ends in what is new
        ]
        if found and may_stop:
            end, start, self.matched = min(found)
            return text[: end if self._include else start]
        keep = len(text) - self._tail(text)
        text, self._held = text[:keep], text[keep:]
        return text

    def finish(self) -> str:
        """Returns what was held back, at the end of the text."""
        text, self._held = self._held, ""
        return text

    def _tail(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            tail = text[-length:]
            place = bisect_right(self._sorted, tail)  # strings that begin with it follow it
            if place < len(self._sorted) and self._sorted[place].startswith(tail):
                return length
        return 0
