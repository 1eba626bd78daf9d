"""A file either has its whole content or isn't there."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest import mock

import pytest

from megatron.core.files import durable
from megatron.core.files.durable import replaced_file, write_durably, write_errors
from megatron.errors import DataError
from tests.harness.sentences import expect_error


def test_content_replaces_the_file_at_the_end(tmp_path: Path) -> None:
    """Readers see the old content until the new one is complete, with the usual permissions."""
    path = tmp_path / "file"
    path.write_text("old")
    with replaced_file(path) as aside:
        aside.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    (tmp_path / "other").write_text("")
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode
    assert len(list(tmp_path.iterdir())) == 2


def test_failure_leaves_the_old_file(tmp_path: Path) -> None:
    """Whatever ends the block, nothing half-written stays."""
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(TypeError), replaced_file(path) as aside:
        aside.write_text("half") + "not a number"  # type: ignore[operator]
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("file", "old")]


def test_an_interrupted_write_leaves_what_was_there(tmp_path: Path) -> None:
    """A manifest or tracker of which half is written makes a whole checkpoint useless."""
    path = tmp_path / "file"
    write_durably(path, "old")
    with mock.patch.object(durable, "sync_path", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        write_durably(path, "new")
    assert path.read_text() == "old"
    write_durably(path, b"new")
    assert path.read_text() == "new"


def test_two_writers_do_not_meet(tmp_path: Path) -> None:
    """Ranks that write the same cache at once each have their own file until they rename it."""
    path = tmp_path / "file"
    with replaced_file(path) as first, replaced_file(path) as second:
        assert first != second
        first.write_text("same")
        second.write_text("same")
    assert path.read_text() == "same"


@pytest.mark.parametrize(
    ("number", "code", "advice"),
    [(errno.ENOSPC, 1, "free some space"), (errno.EACCES, 2, "")],
    ids=["full", "not allowed"],
)
def test_disk_trouble_names_the_file_and_the_remedy(number: int, code: int, advice: str) -> None:
    """Of a folder that nobody can write to, the user was told to free space in it."""
    with (
        expect_error(DataError, "/x/y", os.strerror(number), advice, "buy a disk", exit_code=code),
        write_errors(Path("/x/y"), remedy="buy a disk"),
    ):
        raise OSError(number, os.strerror(number))
