"""The list of benchmarks, the table of their ratios, and that each of them runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import __main__ as program
from benchmarks import results
from benchmarks.against_commit import divided
from benchmarks.catalogue import CATALOGUE, FOLDER, PARTS, Benchmark, first_line
from megatron.errors import ConfigError
from tests.harness.sentences import expect_error


def test_every_module_is_a_benchmark_of_the_list_or_a_part() -> None:
    """A new benchmark would be in no list, and nothing would notice that it has stopped to run."""
    modules = {path.stem for path in FOLDER.glob("*.py")} - {"__main__"}
    assert modules == {*CATALOGUE} | PARTS
    assert not {*CATALOGUE} & PARTS


def test_the_list_says_what_each_measures(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main([]) == 0
    said = capsys.readouterr().out
    for name, each in CATALOGUE.items():
        assert f"{name}: {first_line(name)}\n    peers: {each.peers}\n    goal: {each.goal} (" in said
        assert first_line(name).endswith("."), f"{name}: its docstring begins with no sentence of its own"


def test_the_table_of_commands_has_all_of_them() -> None:
    """A benchmark that CONTRIBUTING's table lacks is run by nobody who changes what it measures."""
    table = (FOLDER.parent / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("\n\nThe default tier")[0]
    named = re.findall(r"`\.venv/bin/python (?:-m benchmarks\.|benchmarks/)(\w+)", table)
    assert sorted(named) == sorted(CATALOGUE)


def test_quick_changes_defaults_and_not_what_was_given() -> None:
    parser = results.parser_of("About.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    for argv, rounds, tokens in (("--quick --tokens 9", 1, 9), ("--quick", 1, 2), ("--tokens 9", 5, 9)):
        parser.set_defaults(rounds=5, tokens=64)
        found = results.parse(parser, argv.split(), rounds=1, tokens=2)
        assert (found.rounds, found.tokens) == (rounds, tokens), argv


def test_a_ratio_that_is_no_number_is_not_saved(tmp_path: Path) -> None:
    """An empty table looked like one that had been measured."""
    options: Any = SimpleNamespace(ratios=tmp_path / "ratios.json")
    with expect_error(ValueError):
        results.save(options, {"save": 1.0, "load": float("nan")})
    with pytest.raises(ValueError, match="no ratio"):
        results.save(options, {})
    assert not options.ratios.exists()


def test_flags_after_a_double_dash_are_for_both_commands() -> None:
    """The documented line with --script before the dashes ended in "unrecognized arguments"."""
    assert divided(["v1.0", "--script", "pretrain_t5.py", "--", "--decoder-seq-length", "64"]) == (
        ["v1.0", "--script", "pretrain_t5.py"],
        ["--decoder-seq-length", "64"],
    )
    assert divided(["v1.0"]) == (["v1.0"], [])


def test_a_benchmark_that_fails_ends_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All have a row of the table and of the file, and the exit code is 1."""
    listed = {
        "first": Benchmark("a peer", "time over its", at_most=1.1),
        "broken": Benchmark("a peer", "speed over its", at_least=1.0),
        "silent": Benchmark("a peer", "speed over its", at_least=1.0),
        "elsewhere": Benchmark("a peer", "speed over its", at_least=1.0),
        "last": Benchmark("a peer", "speed over its", at_least=1.2),
    }
    answers: dict[str, dict[str, Any]] = {
        "first": {"ratios": [{"what": "save", "ratio": 1.05, "has_goal": True}]},
        "elsewhere": {"skipped": "it has no such disk"},
        "last": {
            "ratios": [
                {"what": "GPT", "ratio": 1.1, "has_goal": True},
                {"what": "memory", "ratio": 0.5, "has_goal": False},
            ]
        },
    }

    ran_quick: list[bool] = []

    def ran(command: list[str], **options: Any) -> SimpleNamespace:
        name = command[2].removeprefix("benchmarks.")
        if name in answers:
            Path(command[command.index("--ratios") + 1]).write_text(json.dumps(answers[name]))
        ran_quick.append("--quick" in command)
        return SimpleNamespace(returncode=1 if name == "broken" else 0)

    monkeypatch.setattr(program, "CATALOGUE", listed)
    monkeypatch.setattr(subprocess, "run", ran)
    saved = tmp_path / "all.json"
    assert program.main(["all", "--json", str(saved)]) == 1
    assert capsys.readouterr().out.splitlines()[-6:] == [
        "| first | save | 1.050 | at most 1.1 | reached |",
        "| broken | FAILED: exit code 1 | | at least 1 | |",
        "| silent | FAILED: it saved no ratios | | at least 1 | |",
        "| elsewhere | skipped: it has no such disk | | at least 1 | |",
        "| last | GPT | 1.100 | at least 1.2 | missed |",
        "| last | memory | 0.500 | none |  |",
    ]
    found = json.loads(saved.read_text())
    assert found["processor"] == program.processor() and not found["quick"]
    assert [row["reached"] for row in found["ratios"]] == [True, False, None]
    assert [*found["failed"]] == ["broken", "silent"] and [*found["skipped"]] == ["elsewhere"]
    assert program.main(["all", "last"]) == 0, "a goal that is missed is no failure"
    assert ran_quick == 6 * [False]
    assert program.main(["all", "last", "--quick"]) == 0
    assert ran_quick[-1], "the benchmark is told"
    assert "| last | GPT | 1.100 | at least 1.2 |  |" in capsys.readouterr().out.splitlines(), (
        "tiny sizes are not judged"
    )


@pytest.mark.parametrize(
    "argv",
    [
        "all expert",
        "all --json missing/file.json",
        "list experts",
    ],
)
def test_mistakes_are_said_before_anything_runs(argv: str) -> None:
    with expect_error(ConfigError):
        program.main(argv.split())


@pytest.mark.slow
@pytest.mark.parametrize("name", CATALOGUE)
def test_runs_in_small(name: str, tmp_path: Path) -> None:
    """One of them ended in an ImportError for weeks: nothing ran it. Each prints numbers, and saves ratios."""
    pytest.importorskip("transformers", reason="the peers are the dev extra's")
    saved = tmp_path / "ratios.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--ratios", str(saved)]
    # Two threads that wait for each other in a loop would use up the time that a busy machine has for them.
    waiting = os.environ | {"OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(
        command, cwd=FOLDER.parent, env=waiting, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(saved.read_text())
    if "skipped" in found:
        pytest.skip(found["skipped"])
    assert all(row["ratio"] > 0 for row in found["ratios"]), found
    rows = [line for line in done.stdout.splitlines() if re.search(r"\d", line)]
    assert rows, done.stdout
    assert not re.search(r"\b(nan|inf)\b", done.stdout), done.stdout
