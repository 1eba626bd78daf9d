"""Results that were bad twice, for the next start, and the list of iterations whose results were rejected.

A file beside the checkpoints says which devices computed them, so that other ones can tell whose fault it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from megatron.core.files.durable import write_durably, write_errors
from megatron.core.files.remote_path import AnyPath, path_of
from megatron.errors import CheckpointError, DataError, read_errors
from megatron.small_files import Between, as_kind, parse_json, read_json, read_text

SUSPECT = "suspect.json"
_ITERATION = Annotated[int, Between(1, 1 << 62)]


@dataclass(frozen=True)
class Suspect:
    """A step whose result was bad twice. ``places``: host and device of each rank that computed it."""

    iteration: int
    consumed_samples: int
    what: str
    places: list[str]


def read_suspect(save: str | None) -> Suspect | None:
    """The suspect of a run that saves there, if any. Raises CheckpointError for a damaged file."""
    path = None if save is None else path_of(save) / SUSPECT
    if path is None or not path.exists():
        return None
    try:
        found: Suspect = read_json(path, Suspect, error=CheckpointError)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; delete the file to go on without it") from None
    return found


def write_suspect(save: str, suspect: Suspect | None) -> None:
    """Write the suspect of a run, or delete the file of one that has been judged."""
    path: AnyPath = path_of(save) / SUSPECT
    if suspect is not None:
        write_durably(path, json.dumps(asdict(suspect), indent=2) + "\n")
    elif path.exists():
        path.unlink()


def rejected_iterations(tracker: str | None) -> list[int]:
    """The iterations that a file of ``--result-rejected-tracker-filename`` lists. Raises DataError for another file."""
    if tracker is None or not Path(tracker).exists():
        return []
    with read_errors(tracker):
        lines = read_text(Path(tracker), where=tracker, error=DataError).splitlines()
    found = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            fields = parse_json(line, Mapping[str, Any], where=f"{tracker}:{number}", error=DataError)
            found.append(as_kind(fields.get("iteration"), _ITERATION, where=f"{tracker}:{number}", error=DataError))
    return found


def reject(tracker: str | None, iteration: int, what: str) -> None:
    """Add an iteration to the file of ``--result-rejected-tracker-filename``."""
    if tracker is None:
        return
    line = {"iteration": iteration, "result": what, "time": f"{datetime.now():%Y-%m-%d %H:%M:%S}"}
    remedy = "name another file with --result-rejected-tracker-filename"
    with write_errors(Path(tracker), remedy=remedy), Path(tracker).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
