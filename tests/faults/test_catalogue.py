"""The faults still apply, are spread over the project, and each has a verdict of this very edit."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.faults.affected import AFFECTED, affected, likely
from tests.faults.catalogue import FAULTS, SURVIVORS, public_reports
from tests.faults.copy_of_checkout import Run
from tests.faults.fault import REPOSITORY, Fault
from tests.faults.judge import outcome
from tests.faults.record import UNFINISHED, read_record, without_verdict


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_still_applies(fault: Fault) -> None:
    """The text that a fault replaces is there once, and what it makes of the file is still Python."""
    made = fault.applied((REPOSITORY / fault.file).read_text(encoding="utf-8"))
    compile(made, fault.file, "exec")
    assert fault.suffers.endswith(".")


def test_every_part_of_the_project_has_faults() -> None:
    """A package without a fault would be proven by nothing."""
    found = Counter(str(Path(fault.file).parent) for fault in FAULTS)
    for package in AFFECTED:
        assert any(Path(each).is_relative_to(package) for each in found) or Path(package).suffix, package
    assert len(FAULTS) == len({fault.name for fault in FAULTS}) >= 120
    assert len(public_reports.FAULTS) >= 10
    assert all(fault.report.startswith("https://") for fault in public_reports.FAULTS)


def test_contributing_tells_their_number() -> None:
    """It went on telling of 156 when there were 190."""
    told = re.search(
        r"`tests/faults/catalogue` holds (\d+) mistakes", (REPOSITORY / "CONTRIBUTING.md").read_text("utf-8")
    )
    assert told is not None
    assert int(told[1]) == len(FAULTS), "correct the number in CONTRIBUTING.md"


def test_affected_parts_exist() -> None:
    """A part that was renamed would be left out of every run."""
    for fault in FAULTS:
        for part in [*affected(fault), *likely(fault)]:
            assert (REPOSITORY / part).exists(), f"{fault.name}: {part}"


def test_record_is_of_these_faults() -> None:
    """At least 95 % of the faults turned the default tier red, and it is said why the others did not."""
    record = read_record()
    assert [fault.name for fault in without_verdict(FAULTS, record)] == [], (
        "python -m tests.faults --missing judges them"
    )
    assert record.keys() == {fault.name for fault in FAULTS}
    survivors = {name for name, verdict in record.items() if not verdict.red}
    assert survivors == SURVIVORS.keys()
    assert len(survivors) <= 0.05 * len(FAULTS)


def test_outcome_of_a_run() -> None:
    """No tests, a hang and a crash are told apart: only what the suite noticed counts as red."""
    assert outcome(Run(1, failed=["a", "b"])) == ("failed", "a")
    assert outcome(Run(None, hung=True, running="a")) == ("hung", "a")
    assert outcome(Run(3, running="a")) == ("crashed", "a")
    assert {outcome(Run(code))[0] for code in (0, 5)} == {"survived"}
    assert outcome(Run(None)) == (UNFINISHED, "")


def test_a_fault_that_no_longer_applies_is_named() -> None:
    """A fault without effect would count as one that survives, or be counted as red for another reason."""
    fault = Fault("lost", "setup.py", old="twice", new="once", suffers="Nothing.")
    with pytest.raises(ValueError, match="fault lost: setup.py holds the text that it replaces 2 times, not once"):
        fault.applied("twice, twice")
