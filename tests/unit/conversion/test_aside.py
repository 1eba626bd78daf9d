"""Hidden folders of conversions: those of dead processes go, all others stay."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from megatron.core.conversion.aside import delete_leftovers, folder_aside


def test_only_what_a_dead_process_of_this_host_left_is_deleted(tmp_path: Path) -> None:
    """A killed conversion left a hidden folder as large as its model for good; a running one must keep its own."""
    dead = tmp_path / f".a.partial-{platform.node()}-0123abcd"
    other = tmp_path / ".a.partial-another-host-0123abcd"
    starting = tmp_path / f".b.partial-{platform.node()}-89abcdef"
    foreign = [tmp_path / ".iter_0000010.partial-0a1b2c3d", tmp_path / ".a.partial-x"]
    for folder in (dead, other, *foreign):
        (folder / "a").mkdir(parents=True)
        (folder / "lock").touch()
        (folder / "a/weights").write_bytes(b"x" * 1000)
    starting.mkdir()
    said: list[str] = []
    with folder_aside(tmp_path, "a", say=said.append) as mine:
        assert said == [
            f"note: {other} is what another conversion left, or is still writing: delete it if none is running",
            f"deleted {dead}: 0.0 GB that a killed conversion left",
            f"deleted {starting}: 0.0 GB that a killed conversion left",
        ]
        mine.mkdir()
        delete_leftovers(tmp_path, say=lambda words: None)
        assert mine.is_dir()
        mine.rename(tmp_path / "a")
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "a", other, *foreign])


def test_nothing_stays_after_an_error(tmp_path: Path) -> None:
    def interrupted() -> None:
        with folder_aside(tmp_path / "new", "a", say=print) as mine:
            mine.mkdir()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not list((tmp_path / "new").iterdir())
