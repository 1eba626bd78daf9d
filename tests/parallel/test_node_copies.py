"""Copies on nodes: a run that is killed and loses a node's folder ends as the run that was left alone, bit for bit."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import time
from pathlib import Path
from unittest import mock

import pytest

from megatron.core.checkpointing.find import find_checkpoint
from megatron.core.checkpointing.save import PendingSave
from megatron.core.models.registry import FAMILIES
from megatron.core.parallel.context import ParallelContext
from megatron.errors import StorageAwayError
from megatron.training.loop import train_from_start_to_end
from megatron.training.reporting.metrics import StepRecord
from megatron.training.run.run import Run
from tests.end_to_end.commands import assert_same_tensors
from tests.harness import run_ranks
from tests.harness.runs import axes_of, context_of, tiny_config

RANKS, LENGTH, KILLED_AT = 4, 8, 7
BASE = f"--mock-data --tokenizer-type NullTokenizer --train-iters {LENGTH} --save-interval 100 --log-interval 1"
COPIES = "--non-persistent-save-interval 2 --replication --replication-jump 2"
LAYOUTS = {
    "zero-1": "--use-distributed-optimizer --async-save",
    "zero-2": "--use-distributed-optimizer --data-parallel-sharding-strategy optim_grads",
    "zero-3": "--use-distributed-optimizer --data-parallel-sharding-strategy optim_grads_params",
    "tp-pp": "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
    "experts": "--num-experts 4 --expert-model-parallel-size 2 --async-save",
    "muon": "--optimizer muon --use-distributed-optimizer",
    "diloco": "--diloco-workers 2 --diloco-sync-interval 3",
}
slow = pytest.mark.slow(reason="runs of four ranks; the default tier proves the choice, a drill the whole")


class KilledError(Exception):
    """Ends a run where a kill would."""


def leg(context: ParallelContext, flags: str, killed_at: int | None) -> str:
    """One start of a run on this rank, two ranks a node; what it printed."""
    os.environ["NODE"] = str(context.mesh.world_rank // 2)
    config = tiny_config(flags, ranks=context.mesh.world_size)

    def built(run: Run) -> None:
        def stepped(record: StepRecord) -> None:
            if record.iteration == killed_at:
                time.sleep(0.5)  # copies in the background are written
                raise KilledError

        run.after_step.append(stepped)

    spec = FAMILIES["gpt"].train_spec
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(KilledError):
        train_from_start_to_end(config, spec, context_of(config, context), started=time.monotonic(), built=built)
    return said.getvalue()


def start(flags: str, *, killed_at: int | None = None) -> str:
    """A start in new processes; its log."""
    return "".join(run_ranks(leg, flags, killed_at, reuse=False, **axes_of(tiny_config(flags, ranks=RANKS))))


def places(folder: Path, name: str, kind: str = "local") -> str:
    where = f" --non-persistent-local-ckpt-dir {folder}/node$NODE" if kind == "local" else ""
    return f"--save {folder / name} --load {folder / name} --non-persistent-ckpt-type {kind}{where}"


@slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_lost_node_costs_nothing(layout: str, tmp_path: Path) -> None:
    """Every kind of state is in a copy, and a new node gets its part from others."""
    flags = f"{BASE} {LAYOUTS[layout]}"
    start(f"{flags} --save {tmp_path / 'whole'}")
    copied = f"{flags} {COPIES} {places(tmp_path, 'run')}"
    start(copied, killed_at=KILLED_AT)
    shutil.rmtree(tmp_path / "node1")
    log = start(copied)
    newest = 4 if "--async-save" in flags else 6  # what is written in the background is whole a step later
    assert f"recovering from the copy of iteration {newest}, in place of a new run" in log
    assert_same_tensors(find_checkpoint(tmp_path / "whole").path, find_checkpoint(tmp_path / "run").path)
    assert not [*tmp_path.glob("node*/*")]


@slow
def test_a_copy_loads_at_another_layout(tmp_path: Path) -> None:
    """The nodes that are left train on with what their memories hold."""
    copied = f"{BASE} {COPIES} {places(tmp_path, 'run')}"
    start(f"{copied} --tensor-model-parallel-size 2", killed_at=KILLED_AT)
    shutil.rmtree(tmp_path / "node1")
    assert "recovering from the copy of iteration 6" in start(f"{copied} --use-distributed-optimizer")


@slow
def test_a_damaged_part_is_taken_from_its_partner(tmp_path: Path) -> None:
    """A bit that flips in memory is found, and the other copy is used."""
    flags = f"{BASE} --use-distributed-optimizer"
    start(f"{flags} --save {tmp_path / 'whole'}")
    copied = f"{flags} {COPIES} {places(tmp_path, 'run')}"
    start(copied, killed_at=KILLED_AT)
    (victim,) = tmp_path.glob("node0/*/iter_0000006/__0_0.distcp")
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 16
    victim.write_bytes(data)
    assert "recovering from the copy of iteration 6" in start(copied)
    assert_same_tensors(find_checkpoint(tmp_path / "whole").path, find_checkpoint(tmp_path / "run").path)


@slow
def test_without_partners_a_lost_node_means_the_checkpoint(tmp_path: Path) -> None:
    """The log says what is lacking; a copy of another run in the same folder is never taken."""
    flags = f"{BASE} --use-distributed-optimizer --non-persistent-save-interval 2 {places(tmp_path, 'run')}"
    flags = flags.replace("--save-interval 100", "--save-interval 5")
    start(flags, killed_at=KILLED_AT)
    shutil.rmtree(tmp_path / "node1")
    log = start(flags, killed_at=LENGTH)
    assert "warning: the copy of iteration 6 lacks 2 of its files on all nodes" in log
    assert "successfully loaded checkpoint" in log and "iter_0000005" in log
    shutil.rmtree(tmp_path / "run")
    assert "recovering" not in start(flags)


@slow
def test_a_global_copy_is_one_checkpoint(tmp_path: Path) -> None:
    """On a quicker file system that all ranks share."""
    flags = f"{BASE} --use-distributed-optimizer"
    start(f"{flags} --save {tmp_path / 'whole'}")
    copied = f"{flags} --non-persistent-save-interval 2 {places(tmp_path, 'run', 'global')}"
    start(copied, killed_at=KILLED_AT)
    assert [path.name for path in (tmp_path / "run" / "non_persistent").glob("iter_*")] == ["iter_0000006"]
    assert "recovering from the copy of iteration 6" in start(copied)
    assert_same_tensors(find_checkpoint(tmp_path / "whole").path, find_checkpoint(tmp_path / "run").path)


def leg_without_storage(context: ParallelContext, flags: str) -> str:
    """A start whose ``--save`` fails whenever it is written; the sentence that it ends with."""
    config, spec = tiny_config(flags, ranks=context.mesh.world_size), FAMILIES["gpt"].train_spec
    away = OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH), "disk")
    with mock.patch.object(PendingSave, "_write", side_effect=away), pytest.raises(StorageAwayError) as caught:
        train_from_start_to_end(config, spec, context_of(config, context), started=time.monotonic())
    return str(caught.value)


@slow
def test_a_storage_that_stays_away_at_the_end_leaves_a_copy(tmp_path: Path) -> None:
    """The result of weeks was in memory alone when the process gave up."""
    flags = f"{BASE} --use-distributed-optimizer".replace("--save-interval 100", "--save-interval 3")
    start(f"{flags} --save {tmp_path / 'whole'}")
    flags += f" --save {tmp_path / 'run'} --load {tmp_path / 'run'} --save-fallback-dir {tmp_path / 'left'}"
    start(flags, killed_at=5)
    gone = f"{flags} --save-retry-minutes-at-end 0.1"
    said = run_ranks(leg_without_storage, gone, reuse=False, **axes_of(tiny_config(gone, ranks=RANKS)))
    assert len({*said}) == 1
    assert f"a copy of iteration {LENGTH} is in {tmp_path / 'left'}" in said[0]
    log = start(flags)
    assert f"recovering from the copy of iteration {LENGTH}, in place of the checkpoint of iteration 3" in log
    assert_same_tensors(find_checkpoint(tmp_path / "whole").path, find_checkpoint(tmp_path / "run").path)
