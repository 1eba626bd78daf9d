"""Launch lines of public scripts: what is accepted, with which remarks, and why the others are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.regenerate_launch_lines import LaunchLine, outcome_of, read_launch_lines

LINES = read_launch_lines()


@pytest.mark.parametrize("line", LINES, ids=[line.title[2:] for line in LINES])
def test_launch_line(line: LaunchLine, tmp_path: Path) -> None:
    """Of 64 lines 7 were accepted, and the others refused also for spellings of what is there. To the letter: see
    tests/golden/regenerate_launch_lines.py.
    """
    assert outcome_of(line, tmp_path) == line.outcome


def test_no_flag_of_a_public_line_is_unknown() -> None:
    """Whoever brings a script reads a verdict on each flag, not that it doesn't exist."""
    assert len(LINES) >= 100
    assert [line.title for line in LINES if any("there is no flag" in sentence for sentence in line.outcome)] == []
    assert sum(line.outcome[0].startswith("= ") for line in LINES) >= 70
