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
