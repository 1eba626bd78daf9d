"""docs/correctness.md names tests that exist, and enough of them."""

from __future__ import annotations

import ast
import re
from functools import cache

from tests.architecture.source_tree import ROOT
from tests.correctness import PAGE, rows


@cache
def collected_from(file: str) -> frozenset[str]:
    """Names of the test functions of a file, which pytest collects if the file's name begins with ``test_``."""
    path = ROOT / file
    if not path.is_file() or not path.name.startswith("test_"):
        return frozenset()
    return frozenset(
        node.name for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)
    )


def test_every_named_test_exists() -> None:
    """A test that was renamed leaves a row that proves nothing."""
    missing = [f"{file}::{name}" for _, names in rows() for file, name in names if name not in collected_from(file)]
    assert not missing, "docs/correctness.md names tests that don't exist:\n" + "\n".join(missing)


def test_every_row_has_reports_and_tests() -> None:
    """A row that the pattern does not read would be left out of what is run."""
    written = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| [")]
    assert len(written) == len(rows()) >= 30
    for links, names in rows():
        assert names, links
        assert re.fullmatch(r"(\[[^\]]+\]\(https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+\)(, )?)+", links), (
            links
        )
