"""The committed record of verdicts, ``results.json``, and the reasons why some faults may survive."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.faults.fault import Fault

RESULTS = Path(__file__).with_name("results.json")
UNFINISHED = "unfinished"
"""How the run of a fault ended for which there was too little time: no verdict."""


@dataclass(frozen=True)
class Verdict:
    """What the default tier said of a fault.

    ``how``: "failed", "hung" (a test did not end), "crashed" (pytest itself ended, or no test could be imported) or
    "survived", or ``UNFINISHED``. ``test``: the first that failed or hung. ``digest``: of the edit that was judged.
    """

    digest: str
    how: str
    test: str
    seconds: float

    @property
    def red(self) -> bool:
        """Whether the suite noticed."""
        return self.how not in ("survived", UNFINISHED)


def read_record() -> dict[str, Verdict]:
    """Verdicts by the name of the fault; none when nothing has been judged."""
    if not RESULTS.exists():
        return {}
    return {name: Verdict(**each) for name, each in json.loads(RESULTS.read_text(encoding="utf-8")).items()}


def record_verdict(fault: Fault, verdict: Verdict) -> None:
    """Add a verdict to the record, whole or not at all, beside those that other processes add."""
    folder = os.open(RESULTS.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        record = read_record() | {fault.name: verdict}
        text = json.dumps({name: asdict(record[name]) for name in sorted(record)}, indent=1) + "\n"
        temporary = RESULTS.with_suffix(".new")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(RESULTS)
    finally:
        os.close(folder)


def without_verdict(faults: Sequence[Fault], record: Mapping[str, Verdict]) -> list[Fault]:
    """Those that were never judged to the end, or as another edit."""
    judged = {name: each.digest for name, each in record.items() if each.how != UNFINISHED}
    return [fault for fault in faults if judged.get(fault.name) != fault.digest]
