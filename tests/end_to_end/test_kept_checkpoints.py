"""Checkpoints that an earlier version wrote: they load, at another layout too, and training goes on as it did then."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.golden.regenerate_checkpoints import CHECKPOINTS, LOSSES, RECIPES, going_on


@pytest.mark.parametrize("name", RECIPES)
def test_going_on_from_an_earlier_version(name: str, tmp_path: Path) -> None:
    """On one rank from two, with the state of the optimizer and of the random streams."""
    folder = tmp_path / name
    shutil.copytree(CHECKPOINTS / name, folder)
    expected = json.loads(LOSSES.read_text())[name]
    assert going_on(name, folder) == pytest.approx(expected, rel=1e-4)
