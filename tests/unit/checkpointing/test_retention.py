"""Old checkpoints go only as asked, and never the last good one."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from megatron.core.checkpointing.find import find_checkpoint, whole_checkpoints
from megatron.core.checkpointing.retention import Retention, prune
from megatron.core.checkpointing.save import save_checkpoint
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.sharding import ShardedState, Sharding

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
