"""Hidden folders of conversions: those of dead processes go, all others stay."""

from __future__ import annotations

import errno
import platform
import shutil
from collections.abc import Iterator
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
            f"note: {other} belongs to another conversion, which may have been killed: delete it if none is running",
            f"deleted {dead}: 0.0 GB that a killed conversion left",
            f"deleted {starting}: a killed conversion left it empty",
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
    assert not (tmp_path / "new").exists()


def test_cleaners_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock was free while a folder was counted and deleted: another conversion ended in a traceback."""
    dead = tmp_path / f".a.partial-{platform.node()}-0123abcd"
    dead.mkdir()
    (dead / "lock").touch()
    said: list[str] = []
    count = Path.rglob

    def meanwhile(folder: Path, pattern: str) -> Iterator[Path]:
        delete_leftovers(tmp_path, say=lambda words: said.append(f"the other: {words}"))
        return count(folder, pattern)

    monkeypatch.setattr(Path, "rglob", meanwhile)
    delete_leftovers(tmp_path, say=said.append)
    assert said == [f"deleted {dead}: 0.0 GB that a killed conversion left"]


def test_what_vanishes_or_cannot_be_deleted_is_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that another conversion deletes first is nobody's news; one that stays was called deleted."""
    said: list[str] = []
    gone, stays = (tmp_path / f".a.partial-{platform.node()}-0123abc{number}" for number in "12")
    for folder in (gone, stays):
        (folder / "a").mkdir(parents=True)
        (folder / "lock").touch()
    delete = shutil.rmtree

    def fail(folder: Path) -> None:
        if folder == gone:
            delete(folder)
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    monkeypatch.setattr(shutil, "rmtree", fail)
    delete_leftovers(tmp_path, say=said.append)
    assert said == [
        f"note: {stays} belongs to another conversion, which may have been killed: delete it if none is running"
    ]
