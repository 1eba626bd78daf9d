"""Checkpoints across real ranks: saved by one world over gloo, loaded by another, failing and falling back together."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from unittest import mock

import pytest
import torch

from megatron.core.checkpointing.find import find_checkpoint
from megatron.core.checkpointing.load import load_checkpoint, read_run_document
from megatron.core.checkpointing.save import PendingSave, begin_save, save_checkpoint
from megatron.core.checkpointing.sharded_view import Staging
from megatron.core.files.remote_path import AnyPath
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.sharding import ShardedState, Sharding
from megatron.errors import CheckpointError
from megatron.training.checkpoints.saving import saving
from tests.harness import run_ranks
from tests.harness.runs import tiny_run
from tests.harness.sentences import check_refusals
from tests.tiers import tiers
from tests.unit.checkpointing.simulated import Layout, assert_holds, logical_values, state_of

Result = TypeVar("Result")

WIDE = Layout(tp=2, pp=2, dp=2, zero=True)
ODD = Layout(tp=3, dp=1)


def on_world(layout: Layout, function: Callable[..., Result], *arguments: object) -> list[Result]:
    """``run_ranks`` with the sizes of ``layout``."""
    return run_ranks(function, *arguments, tp=layout.tp, pp=layout.pp, dp=layout.dp, cp=layout.cp)


def save(context: ParallelContext, root: Path, layout: Layout, seed: int, background: bool) -> AnyPath:
    states = state_of(layout, context.mesh, logical_values(seed))
    pending = begin_save(
        root, 10 * seed, states, {"seed": seed}, context.mesh, background=Staging() if background else None
    )
    if background:
        for state in states:
            state.tensor.fill_(-1.0)
    return pending.finish()


def load(context: ParallelContext, root: Path, layout: Layout) -> tuple[int, tuple[str, ...]]:
    folder = find_checkpoint(root, mesh=context.mesh)
    states = state_of(layout, context.mesh, None)
    load_checkpoint(folder, states, context.mesh)
    assert_holds(states, context.mesh, logical_values(read_run_document(folder)["state"]["seed"]))
    return folder.iteration, folder.passed_over


@pytest.mark.parametrize("background", tiers([False, True], first=[True]), ids=["sync", "background"])
def test_another_world_goes_on_from_the_same_numbers(background: bool, tmp_path: Path) -> None:
    """Eight ranks with everything split save, three load, and back."""
    saved = on_world(WIDE, save, tmp_path, WIDE, 1, background)
    assert set(saved) == {tmp_path / "iter_0000010"}
    assert on_world(ODD, load, tmp_path, ODD) == [(10, ())] * 3
    on_world(ODD, save, tmp_path, ODD, 2, background)
    assert on_world(WIDE, load, tmp_path, WIDE) == [(20, ())] * 8


def test_all_ranks_fall_back_together(tmp_path: Path) -> None:
    """Ranks that resumed from different iterations would diverge in silence."""
    layout = Layout(dp=2, zero=True)
    for seed in (1, 2):
        on_world(layout, save, tmp_path, layout, seed, False)
    data = tmp_path / "iter_0000020" / "__1_0.distcp"
    data.write_bytes(data.read_bytes()[:-1] + b"!")
    reason = "iter_0000020: __1_0.distcp is damaged (checksum mismatch)"
    assert on_world(layout, load, tmp_path, layout) == [(10, (reason,))] * 2


def save_with_full_disk_on(context: ParallelContext, root: Path, bad: int) -> str:
    if context.mesh.world_rank == bad:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    mine = torch.zeros(100_000)
    state = [ShardedState("model.w", mine, Sharding((200_000,), split={0: "tp"}))]
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(root, 20, state, {}, context.mesh)
    return str(caught.value)


def test_a_full_disk_on_one_rank_stops_all_with_one_sentence(tmp_path: Path) -> None:
    """No rank hangs in a collective; the older checkpoint stays."""
    layout = Layout(tp=2)
    on_world(layout, save, tmp_path, layout, 1, False)
    messages = run_ranks(save_with_full_disk_on, tmp_path, 1, tp=2, reuse=False)  # a limit stays
    check_refusals(messages, "rank 1 (pp=0 dp=0 cp=0 tp=1)", "__1_0.distcp: File too large")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000010", "latest_checkpointed_iteration.txt"]


def settle_beside_a_slow_rank(context: ParallelContext, root: Path) -> None:
    run = tiny_run(context, f"--mock-data --save {root} --save-interval 1 --async-save")
    is_slow = context.mesh.world_rank == 1
    with mock.patch.object(PendingSave, "is_written", return_value=not is_slow), saving(run) as saver:
        saver.save()
        with mock.patch.object(PendingSave, "finish", side_effect=AssertionError("waits for a rank that is writing")):
            saver.settle()


def test_a_rank_that_is_still_writing_holds_nobody_up(tmp_path: Path) -> None:
    """With --async-save, one slow disk among many would stop the training of all at every save."""
    run_ranks(settle_beside_a_slow_rank, tmp_path, dp=2)
    assert find_checkpoint(tmp_path).iteration == 0
