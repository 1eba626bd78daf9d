"""Shell scripts parse and stop at the first error; the checks say which one failed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.architecture.source_tree import ROOT, files, relative

SCRIPTS = [*files(".sh", ".sbatch"), ROOT / ".ci" / "run"]


@pytest.mark.parametrize("script", SCRIPTS, ids=relative)
def test_script_parses_and_stops_at_errors(script: Path) -> None:
    """A step that fails unnoticed makes every later line a lie."""
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    text = script.read_text(encoding="utf-8")
    assert text.startswith("#!/usr/bin/env bash\n# "), "a script says how it is run and what it does"
    assert "\nset -euo pipefail\n" in text or "\nexec " in text


def test_continuous_integration_is_executable() -> None:
    """It is started by its path, not by bash."""
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_checks_stop_with_the_name_of_what_failed(tmp_path: Path) -> None:
    """Whoever reads the end of a log learns which check it was, and the exit code is not 0."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tools").mkdir()
    (tmp_path / "tests" / "run.sh").write_text((ROOT / "tests" / "run.sh").read_text(encoding="utf-8"))
    (tmp_path / "tools" / "make_venv.sh").write_text("echo made $1\n")
    done = subprocess.run(["bash", "tests/run.sh"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "made dev" in done.stdout
    assert "tests/run.sh: FAILED at: format" in done.stderr


CHECKS = {"ruff": "format", "mypy": "types", "lint-imports": "types", "python": "tests"}
"""Programs that the checks start, and the step that a failure of each is reported by."""


@pytest.mark.parametrize("failing", ["", *CHECKS])
def test_status_of_the_checks_is_that_of_what_they_run(tmp_path: Path, failing: str) -> None:
    """The end of a check that had passed made a run exit 1 in which everything passed."""
    stand_in(tmp_path / "tests/run.sh", (ROOT / "tests/run.sh").read_text(encoding="utf-8"))
    stand_in(tmp_path / "tools/make_venv.sh", "true")
    for program in CHECKS:
        stand_in(tmp_path / ".venv/bin" / program, f"#!/bin/sh\nexit {int(program == failing)}")
    done = subprocess.run(["bash", "tests/run.sh"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == (1 if failing else 0), done.stdout + done.stderr
    assert ("everything passed" in done.stdout) == (not failing)
    assert (f"FAILED at: {CHECKS[failing]}" if failing else "") in done.stderr


@pytest.mark.parametrize(("default_tier", "whole_tier"), [(0, 0), (0, 3), (3, 0)])
def test_status_of_continuous_integration_is_that_of_the_tests(
    tmp_path: Path, default_tier: int, whole_tier: int
) -> None:
    """After a default tier that passes the rest of the whole tier begins; what either ends with is reported."""
    stand_in(tmp_path / ".ci/run", (ROOT / ".ci/run").read_text(encoding="utf-8"))
    stand_in(tmp_path / "tools/make_venv.sh", "true")
    for installed in ("slurmctld", "chromium"):
        stand_in(tmp_path / "bin" / installed, "#!/bin/sh")
    tests = f'echo "tests $*"; [[ "${{1:-}}" == --all ]] && exit {whole_tier}; exit {default_tier}'
    stand_in(tmp_path / "tests/run.sh", tests)
    path = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "TEST_MINUTES": "25"}
    done = subprocess.run(
        ["bash", str(tmp_path / ".ci/run")], env=os.environ | path, capture_output=True, text=True, check=False
    )
    assert done.returncode == (default_tier or whole_tier), done.stdout + done.stderr
    began = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("tests")]
    assert [words[:1] for words in began] == [[], *([["--all"]] if default_tier == 0 else [])]
    assert all(words[2:] == ["--without-default"] for words in began[1:])


def stand_in(path: Path, text: str) -> None:
    """A program in place of the real one."""
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(f"{text}\n", encoding="utf-8")
    path.chmod(0o755)
