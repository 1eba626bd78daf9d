"""Background saves: one at a time, announced when durable, and a failure stops the run at the next step."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron.core.parallel.context import ParallelContext
from megatron.errors import CheckpointError, StorageAwayError
from megatron.training.checkpoints import saving as module
from megatron.training.checkpoints import tiers, waiting
from megatron.training.checkpoints.saving import Saver, saving
from megatron.training.run.stop import NonFiniteError
from tests.harness.sentences import expect_error
from tests.unit.config.command_lines import parse


class FakeSave:
    """Stands for ``PendingSave``, and for the snapshot that it writes."""

    def __init__(self, events: list[str], number: int, iteration: int) -> None:
        self.events, self.number, self.iteration = events, number, iteration
        self.written, self.error = False, CheckpointError()
        self.taken_at = 0.0

    def copy_into(self, _: object) -> None:
        self.events.append(f"copy {self.number}")

    def write_in_background(self) -> None:
        self.events.append(f"begin {self.number} in background")

    def is_written(self) -> bool:
        return self.written

    def finish(self) -> Path:
        self.events.append(f"finish {self.number}")
        if str(self.error):
            raise self.error
        return Path()


class Stage:
    """A run whose saves are fake; ``events`` tells what happened, ``now`` is what its clock says."""

    def __init__(self, *, background: bool) -> None:
        self.events: list[str] = []
        self.saves: list[FakeSave] = []
        self.now, self.error = 0.0, CheckpointError()
        self.run: Any = mock.MagicMock()
        self.run.context, self.run.base = ParallelContext.single(), None
        self.run.config.checkpoint.async_save = background
        self.run.config.checkpoint.save = "folder"
        self.run.config.checkpoint.overwrite_run = False
        self.run.config.checkpoint.non_persistent_ckpt_type = None
        self.run.recovered = False
        self.run.config.checkpoint.save_retry_copies = 1
        self.run.config.checkpoint.save_retry_minutes = 30
        self.run.config.checkpoint.save_retry_minutes_at_end = 120
        self.run.config.reporting.log_progress = False
        self.run.reporter.say = lambda text: self.events.append(text.split()[0])
        self.run.progress.iteration = 7

    def snapshot(self, iteration: int, *_: object, **__: object) -> FakeSave:
        self.saves.append(FakeSave(self.events, len(self.saves), iteration))
        self.saves[-1].error = self.error
        return self.saves[-1]

    def attempt(self, _: object, snapshot: FakeSave, *, attempt: int, is_tried_again: bool) -> FakeSave:
        if attempt or not self.run.config.checkpoint.async_save:
            self.events.append(f"begin {snapshot.number}")
        return snapshot

    def saver(self) -> Saver:
        """A saver that sees the time of this stage."""
        saver = Saver(self.run)
        saver._waiting.clock = lambda: self.now
        return saver

    def prune(self, *_: object) -> None:
        self.events.append("prune")


@pytest.fixture
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    made = Stage(background=getattr(request, "param", True))
    with (
        mock.patch.object(module, "take_snapshot", made.snapshot),
        mock.patch.object(waiting, "PendingSave", made.attempt),
        mock.patch.object(module, "prune", made.prune),
        mock.patch.object(module, "leave_copy", return_value=(True, "a copy of iteration 7 is on every node")),
        mock.patch.object(module, "remove_left_copy"),
        mock.patch.object(module, "run_state", return_value={}),
    ):
        yield made


@pytest.mark.parametrize("stage", [False], indirect=True)
def test_save_in_the_foreground_is_durable_when_it_returns(stage: Stage) -> None:
    """A job that is killed after ``save`` would lose what it had waited for."""
    Saver(stage.run).save()
    assert stage.events == ["saving", "begin 0", "finish 0", "successfully", "prune"]


def test_background_save_is_announced_only_when_durable(stage: Stage) -> None:
    """A checkpoint called saved too early could be lost, and an old one deleted for it."""
    saver = Saver(stage.run)
    saver.save()
    saver.settle()
    assert stage.events == ["saving", "copy 0", "begin 0 in background"]
    stage.saves[0].written = True
    saver.settle()
    assert stage.events[3:] == ["finish 0", "successfully", "prune"]
    saver.settle()
    assert len(stage.events) == 6


def test_at_most_one_save_is_under_way(stage: Stage) -> None:
    """Copies of the model would pile up in main memory when the disk is slower than the interval."""
    saver = Saver(stage.run)
    saver.save()
    saver.save()
    assert [event for event in stage.events if event[0] in "bf"] == [
        "begin 0 in background",
        "finish 0",
        "begin 1 in background",
    ]


def test_failure_surfaces_at_the_next_step(stage: Stage) -> None:
    """A run would train for days with every checkpoint failing."""
    saver = Saver(stage.run)
    saver.save()
    stage.saves[0].written, stage.saves[0].error = True, CheckpointError("no space left")
    with expect_error(CheckpointError):
        saver.settle()
    assert "successfully" not in stage.events
    assert "prune" not in stage.events
    saver.finish()  # what failed is not tried again


def test_nothing_is_written_where_another_run_saves(stage: Stage) -> None:
    """Object storage has no locks: a run that was silent for long may find its folder taken."""

    error = CheckpointError("taken")

    def taken() -> None:
        raise error

    saver = Saver(stage.run, taken)
    for write in (saver.settle, saver.save):
        with pytest.raises(CheckpointError) as caught:
            write()
        assert caught.value is error
    assert stage.events == []


@pytest.mark.parametrize(("error", "code"), [(errno.EACCES, 2), (errno.ENOSPC, 1)])
def test_a_folder_that_cannot_be_held_ends_with_the_code_of_its_reason(tmp_path: Path, error: int, code: int) -> None:
    """A folder nobody may write into ended with 1, so that the job was started again and again."""
    config = parse(f"--save {tmp_path} --save-interval 1")
    with (
        mock.patch.object(module, "held", side_effect=OSError(error, os.strerror(error))),
        pytest.raises(CheckpointError) as caught,
        module.holding_save_folder(config, ParallelContext.single()),
    ):
        pass
    assert caught.value.exit_code == code


@pytest.mark.parametrize(("name", "is_kept"), [("new/run", False), ("new/saved", True), ("there", True)])
def test_a_run_that_saved_nothing_leaves_no_folder(name: str, is_kept: bool, tmp_path: Path) -> None:
    """A start from weights of NaN was refused, and left an empty --save folder and its parents behind."""
    (tmp_path / "there").mkdir()
    config = parse(f"--save {tmp_path / name} --save-interval 1")
    with suppress(CheckpointError), module.holding_save_folder(config, ParallelContext.single()):
        if name == "new/saved":
            (tmp_path / name / "iter_0000001").mkdir()
        raise CheckpointError("not finite")
    assert (tmp_path / name).exists() == is_kept
    assert (tmp_path / "new").exists() == (name == "new/saved")


def test_last_save_is_waited_for(stage: Stage) -> None:
    """The process would end before its last checkpoint is durable."""
    with saving(stage.run) as saver:
        saver.save()
    assert stage.events[-2:] == ["successfully", "prune"]


def test_save_before_a_loss_that_is_no_number_is_kept(stage: Stage) -> None:
    """The checkpoint from just before is what one goes back to."""

    def save_and_fail() -> None:
        with saving(stage.run) as saver:
            saver.save()
            raise NonFiniteError("loss is nan")

    with pytest.raises(NonFiniteError):
        save_and_fail()
    assert stage.events[-2:] == ["successfully", "prune"]


AWAY = StorageAwayError("connection refused")


@pytest.mark.parametrize("stage", [False, True], indirect=True, ids=["sync", "background"])
def test_a_save_waits_for_a_storage_that_is_away(stage: Stage) -> None:
    """A storage that restarted at three in the night ended the run, and the job waited in the queue again."""
    saver, stage.error = stage.saver(), AWAY
    saver.save()
    save = stage.saves[0]
    save.written = True
    if stage.run.config.checkpoint.async_save:
        saver.settle()
    assert stage.events.count("copy 0") == 1  # before training goes on
    stage.events.clear()
    for now, tried in ((9, False), (10, True), (29, False), (30, True)):  # pauses of 10 and 20 seconds
        stage.now = now
        saver.settle()
        assert bool(stage.events) == tried, now
        saver.settle()
        stage.events.clear()
    stage.now, save.error = 70, CheckpointError()
    saver.settle()
    saver.settle()
    assert stage.events[-3:] == ["finish 0", "successfully", "prune"]
    stage.events.clear()
    saver.settle()
    assert stage.events == []


def test_failed_saves_wait_up_to_a_number(stage: Stage) -> None:
    """Copies of every interval of a night would have filled the main memory."""
    saver, stage.error = stage.saver(), AWAY
    for iteration in (7, 8, 9):
        stage.run.progress.iteration = iteration
        saver.save()
    assert [job.iteration for job in saver._waiting.jobs] == [9]  # the newest is what a restart wants
    assert len(saver._waiting._free) <= 1


def test_a_storage_that_stays_away_ends_the_run(stage: Stage) -> None:
    """A run that never saves again would train for days for nothing."""
    saver, stage.error = stage.saver(), AWAY
    saver.save()
    saver.finish()
    stage.now = 60 * 30
    saver.settle()
    with expect_error(StorageAwayError):
        saver.finish()


def test_the_last_save_is_waited_for_until_the_storage_is_back(stage: Stage) -> None:
    """The run had trained to its end, and its process ended with the last checkpoint in memory."""
    attempts = iter([AWAY, AWAY, AWAY, CheckpointError()])

    def sleep(seconds: float) -> None:
        stage.now += seconds
        stage.saves[0].error = next(attempts)

    with mock.patch("time.sleep", sleep), saving(stage.run) as saver:
        saver._waiting.clock = lambda: stage.now
        saver.save()
        stage.saves[0].error = next(attempts)
    assert stage.now == 10 + 20 + 40
    assert stage.events[-2:] == ["successfully", "prune"]


def test_a_copy_is_left_once(stage: Stage) -> None:
    """Giving up at the end, the run deleted the copy that it had left when it began to wait, to write it again."""

    def sleep(seconds: float) -> None:
        stage.now += 7200

    saver, stage.error = stage.saver(), AWAY
    saver.save()
    with mock.patch("time.sleep", sleep), pytest.raises(StorageAwayError):
        saver.make_durable()
    module.leave_copy.assert_called_once()  # type: ignore[attr-defined]  # the fixture's


def test_checkpoints_that_cannot_be_read_now_are_no_new_past() -> None:
    """A restart while the storage was away took the run for one without checkpoints, and deleted its copies."""
    with (
        mock.patch.object(tiers, "is_unused", return_value=False),
        mock.patch.object(tiers, "find_checkpoint", side_effect=AWAY),
        pytest.raises(StorageAwayError),
    ):
        tiers.origin_of(Path("run"))
