"""The tests that docs/correctness.md names. ``python -m tests.correctness`` runs them, without slow combinations.

Further arguments are pytest's: ``-m ""`` runs the slow combinations, too.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[1] / "docs" / "correctness.md"
ROW = re.compile(r"^\| (\[.+?) \| (.+?) \| (`.+`) \|$", re.MULTILINE)
NAME = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def rows() -> list[tuple[str, list[tuple[str, str]]]]:
    """Links of each report, and file and function of its tests."""
    return [(links, NAME.findall(names)) for links, _, names in ROW.findall(PAGE.read_text(encoding="utf-8"))]


def named_tests() -> list[str]:
    """Pytest's names of all tests on the page, each once."""
    return sorted({f"{file}::{name}" for _, names in rows() for file, name in names})


if __name__ == "__main__":
    sys.exit(pytest.main(["-m", "not slow", *named_tests(), *sys.argv[1:]]))
