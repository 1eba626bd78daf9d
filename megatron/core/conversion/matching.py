"""Regular expressions that a stranger's file holds, matched in a process of their own within a limit of time."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from megatron.errors import CheckpointError

SECONDS = 20.0
"""The longest time for all patterns of one kind; thousands of patterns of a real folder take one second."""

_SCRIPT = Path(__file__).with_name("matching_process.py")
_LONGEST_PATTERN = 1000


def matches_of(
    patterns: Sequence[str],
    names: Collection[str],
    *,
    where: str,
    around: Callable[[str], str] = str,
    whole: bool = False,
    seconds: float | None = None,
) -> list[dict[str, str | None]]:
    """For each pattern the names that it matches at their beginning, or as a ``whole``, each with what the pattern's
    group ``number`` holds. ``around``: makes of a pattern the one which is matched.

    Raises CheckpointError for a pattern that is none, and where matching takes too long.
    """
    if not (patterns and names):
        return [{} for _ in patterns]
    for pattern in patterns:
        if len(pattern) > _LONGEST_PATTERN:
            raise CheckpointError(f"{where}: a pattern has {len(pattern):,} characters; at most {_LONGEST_PATTERN:,}")
    limit = SECONDS if seconds is None else seconds
    job = json.dumps({"patterns": [around(each) for each in patterns], "names": [*names], "whole": whole})
    try:
        command = [sys.executable, "-I", "-S", str(_SCRIPT)]
        done = subprocess.run(command, input=job.encode(), capture_output=True, check=False, timeout=limit)
    except subprocess.TimeoutExpired:
        shown = f"{patterns[0][:100]!r}" + (f" and {len(patterns) - 1} more" if len(patterns) > 1 else "")
        raise CheckpointError(
            f"{where}: matching {shown} takes more than {limit:g} s: make the pattern simpler, or write names"
        ) from None
    if done.returncode:
        raise CheckpointError(f"{where}: {patterns[0][:100]!r} ends the process that matches it: make it simpler")
    answer = json.loads(done.stdout)
    if "wrong" in answer:
        index, reason = answer["wrong"]
        raise CheckpointError(f"{where}: {patterns[index][:100]!r} is no regular expression ({reason})")
    found: list[dict[str, str | None]] = answer["found"]
    return found
