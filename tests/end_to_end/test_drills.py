"""Every drill ends as documented; ``python -m tests.drills`` runs them by hand."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.drills.catalogue import DRILLS, NEED_PROGRAMS, NEED_ROOT, run_drill


@pytest.mark.slow(reason="real launchers, minutes each; the default tier proves each guard in one process")
@pytest.mark.parametrize("name", DRILLS)
def test_drill_ends_as_documented(name: str, tmp_path: Path) -> None:
    """A fault that a machine makes on its own comes at night, and is understood from the log alone."""
    if name in NEED_ROOT and os.geteuid() != 0:
        pytest.skip("a file system or network of its own needs root")
    if name in NEED_PROGRAMS and shutil.which(NEED_PROGRAMS[name]) is None:
        pytest.skip(f"{NEED_PROGRAMS[name]} is not installed")
    folder = tmp_path.parent / "drills" / name  # beside those of other drills, which have the same undisturbed run
    folder.mkdir(parents=True)
    run_drill(name, folder, print)
