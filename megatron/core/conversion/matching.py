"""Regular expressions that a stranger's file holds, matched in a process of their own within a limit of time."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.errors import CheckpointError

SECONDS = 20.0
"""The longest time for all patterns of a file; thousands of patterns of a real folder take one second."""

_SCRIPT = Path(__file__).with_name("matching_process.py")
_LONGEST_PATTERN = 1000
_PLAIN = re.compile(r"(?:[\w-]|\\?\.)*")  # nothing in it repeats
_MOST_PLAIN = 100_000  # pairs of a pattern and a name that are matched without a process


@dataclass(frozen=True)
class Pattern:
    """A pattern: its ``text`` in the file, between ``before`` and ``after``. It matches the beginning of a name, or a
    ``whole`` one.
    """

    text: str
    before: str = ""
    after: str = ""
    whole: bool = False

    @property
    def expression(self) -> str:
        """What is matched."""
        return f"{self.before}{self.text}{self.after}"


def matches_of(
    patterns: Sequence[Pattern], names: Collection[str], *, where: str, seconds: float | None = None
) -> list[dict[str, str | None]]:
    """For each pattern the names that it matches, each with what the pattern's group ``number`` holds.

    Raises CheckpointError for a pattern that is none, and where matching takes too long.
    """
    if not (patterns and names):
        return [{} for _ in patterns]
    for pattern in patterns:
        if len(pattern.text) > _LONGEST_PATTERN:
            raise CheckpointError(
                f"{where}: a pattern has {len(pattern.text):,} characters; at most {_LONGEST_PATTERN:,} are read"
            )
    if len(patterns) * len(names) <= _MOST_PLAIN and all(_PLAIN.fullmatch(each.text) for each in patterns):
        return [_matches(each, names) for each in patterns]
    answer = _by_process(patterns, names, where=where, seconds=SECONDS if seconds is None else seconds)
    if "wrong" in answer:
        index, reason = answer["wrong"]
        raise CheckpointError(f"{where}: {patterns[index].text[:100]!r} is no regular expression ({reason})")
    found: list[dict[str, str | None]] = answer["found"]
    return found


def _matches(pattern: Pattern, names: Collection[str]) -> dict[str, str | None]:
    compiled = re.compile(pattern.expression)
    found = {name: compiled.fullmatch(name) if pattern.whole else compiled.match(name) for name in names}
    return {name: match.groupdict().get("number") for name, match in found.items() if match}


def _by_process(patterns: Sequence[Pattern], names: Collection[str], *, where: str, seconds: float) -> dict[str, Any]:
    job = json.dumps({"patterns": [(each.expression, each.whole) for each in patterns], "names": [*names]})
    command = [sys.executable, "-I", "-S", str(_SCRIPT)]
    shown = f"{patterns[0].text[:100]!r}" + (f" and {len(patterns) - 1} more" if len(patterns) > 1 else "")
    try:
        done = subprocess.run(command, input=job.encode(), capture_output=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise CheckpointError(
            f"{where}: matching {shown} takes more than {seconds:g} s: make the pattern simpler, or write names"
        ) from None
    if done.returncode:
        raise CheckpointError(f"{where}: {shown} ends the process that matches patterns: make it simpler")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
