"""Sentences that users read, written by ``python -m tests.golden.regenerate_sentences [ARGUMENTS]``.

Arguments are pytest's. Without them all tests that check sentences run, of both tiers; ``--lf`` records those that
failed last, ``FILE`` or ``FILE::TEST`` some. What a test that fails or is skipped says is kept; tests that are gone are
dropped.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.harness.sentences import (
    RECORD,
    ROOT,
    SNAPSHOT,
    check_line,
    check_refusals,
    check_sentence,
    expect_error,
    function_of,
    outdated,
    read_snapshot,
    write_snapshot,
)

CHECKS = {each.__name__ for each in (expect_error, check_sentence, check_line, check_refusals)}


def users() -> list[str]:
    """Tests that check sentences, directly or by functions of their file."""
    return [
        f"{path.relative_to(ROOT)}::{function}"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "tests.harness.sentences" in (text := path.read_text(encoding="utf-8"))
        for function in checking(text)
    ]


def checking(text: str) -> list[str]:
    """Names of the test functions of a file that come to a check of a sentence."""
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    named = {each.name: {node.id for node in ast.walk(each) if isinstance(node, ast.Name)} for each in functions}
    found = {*CHECKS}
    while more := {name for name, names in named.items() if names & found} - found:
        found |= more
    return [each.name for each in functions if each.name in found and each.name.startswith("test_")]


def merged(before: dict[str, list[str]], folder: Path) -> dict[str, list[str]]:
    """The snapshot with what a run recorded in ``folder``, without tests that no longer exist."""
    said: dict[str, list[str]] = {}
    for file in folder.glob("*.jsonl"):
        said |= dict(json.loads(line) for line in file.read_text(encoding="utf-8").splitlines())
    collected: dict[str, set[str]] = {}
    for file in folder.glob("*.collected"):  # each process collects the same tests
        collected |= {function: {*ids} for function, ids in json.loads(file.read_text(encoding="utf-8")).items()}
    after = {**before, **said}
    gone = {*outdated(after, collected)}
    return {test: sentences for test, sentences in after.items() if sentences and test not in gone}


def main(arguments: Sequence[str], snapshot: Path = SNAPSHOT) -> int:
    """Run the tests, write the snapshot and say how many sentences it has."""
    workers = ["-n", os.environ.get("TEST_WORKERS", "2")] if not arguments else []
    before = read_snapshot(snapshot.read_text(encoding="utf-8")) if snapshot.exists() else {}
    known = sorted({*users(), *map(function_of, before)})  # a test may have ceased to check
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "-q", f"{RECORD}={folder}", *workers, *(arguments or known)]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        after = merged(before, Path(folder))
    snapshot.write_text(write_snapshot(after), encoding="utf-8")
    changed = sum(before.get(test) != after.get(test) for test in {*before, *after})
    sys.stdout.write(f"{snapshot.name}: sentences of {len(after)} tests, {changed} of them changed\n")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
