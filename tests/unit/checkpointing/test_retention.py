"""Old checkpoints go only as asked, and never the last good one."""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path

import pytest
import torch

from megatron.core.checkpointing.find import find_checkpoint, whole_checkpoints
from megatron.core.checkpointing.retention import Retention, prune
from megatron.core.checkpointing.save import save_checkpoint
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.sharding import ShardedState, Sharding
from tests.harness.sentences import check_line, check_sentence

SAVED = [100, 200, 300, 400, 500]


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        (Retention(), SAVED),
        (Retention(keep_last=1), [500]),
        (Retention(keep_last=2), [400, 500]),
        (Retention(keep_last=9), SAVED),
        (Retention(keep_every=200), [200, 400, 500]),
        (Retention(keep_last=2, keep_every=300), [300, 400, 500]),
    ],
)
def test_what_is_kept(retention: Retention, kept: list[int]) -> None:
    """The documented meaning of keep-last and keep-every."""
    surplus = retention.surplus(SAVED, newest=500)
    assert [iteration for iteration in SAVED if iteration not in surplus] == kept


def test_the_newest_and_later_timelines_survive_every_policy() -> None:
    """A user who went back to 300 and saved 350 keeps what an earlier run had saved after it."""
    for last, every in itertools.product([None, 1, 2, 3], [None, 1, 100, 1000]):
        surplus = Retention(last, every).surplus([*SAVED, 350], newest=350)
        assert set(surplus) <= {100, 200, 300}


def test_pruning_deletes_whole_folders_and_counts_only_whole_ones(tmp_path: Path) -> None:
    """A broken checkpoint doesn't take the place of a good one among the last N."""
    state = [ShardedState("model.w", torch.ones(3), Sharding((3,)))]
    for iteration in SAVED:
        save_checkpoint(tmp_path, iteration, state, {}, Mesh.single())
    (tmp_path / "iter_0000400" / "run.json").unlink()
    assert prune(tmp_path, 500, Retention(keep_last=2), Mesh.single()) == [100, 200]
    assert sorted(whole_checkpoints(tmp_path)) == [300, 500]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [
        "iter_0000300",
        "iter_0000400",
        "iter_0000500",
    ]
    assert find_checkpoint(tmp_path).iteration == 500


def save(root: Path, iteration: int) -> Path:
    state = [ShardedState("model.w", torch.ones(3), Sharding((3,)))]
    return Path(str(save_checkpoint(root, iteration, state, {}, Mesh.single())))


def test_what_cannot_be_deleted_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An immutable or NFS-held file ended the run after a durable save, and each later save failed on what it left."""
    unlink = os.unlink

    def held(path: str | Path, *, dir_fd: int | None = None) -> None:
        if Path(path).name == "__0_0.distcp":
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        unlink(path, dir_fd=dir_fd)

    save(tmp_path, 100)
    save(tmp_path, 200)
    monkeypatch.setattr(os, "unlink", held)
    assert prune(tmp_path, 200, Retention(keep_last=1), Mesh.single()) == []
    save(tmp_path, 300)
    assert prune(tmp_path, 300, Retention(keep_last=2), Mesh.single()) == []
    save(tmp_path, 300)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2, "once for each folder, whatever later saves try"
    assert f"{tmp_path / '.iter_0000100.removed-'}" in said[0]
    check_sentence(said[0])
    assert all("Operation not permitted" in text and "each later save tries again" in text for text in said)
    assert sorted(whole_checkpoints(tmp_path)) == [200, 300]
    assert find_checkpoint(tmp_path, step=300).passed_over == ()

    monkeypatch.setattr(os, "unlink", unlink)
    save(tmp_path, 400)
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_checkpoint_that_cannot_be_renamed_stays_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A mount point or an immutable folder: nothing of it is deleted, so it still counts."""
    save(tmp_path, 100)
    save(tmp_path, 200)

    def busy(path: Path, target: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", busy)
        assert prune(tmp_path, 200, Retention(keep_last=1), Mesh.single()) == []
    check_line(caplog.text, "iter_0000100")
    assert sorted(whole_checkpoints(tmp_path)) == [100, 200]
    assert prune(tmp_path, 200, Retention(keep_last=1), Mesh.single()) == [100]


def test_a_linked_checkpoint_loses_its_link(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint that was moved to another disk and linked ended the run; so did the next ones."""
    root, disk = tmp_path / "run", tmp_path / "disk"
    save(root, 100).rename(disk)
    (root / "iter_0000100").symlink_to(disk)
    save(root, 200)
    assert prune(root, 200, Retention(keep_last=1), Mesh.single()) == [100]
    check_line(caplog.text, disk)
    assert sorted(path.name for path in root.iterdir()) == ["iter_0000200", "latest_checkpointed_iteration.txt"]
    assert find_checkpoint(disk).iteration == 100
