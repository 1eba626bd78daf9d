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
from megatron.errors import CheckpointError
from megatron.training.checkpoints import saving as module
from megatron.training.checkpoints.saving import Saver, saving
from megatron.training.run.stop import NonFiniteError
from tests.harness.sentences import expect_error
from tests.unit.config.command_lines import parse


class FakeSave:
    """Stands for ``PendingSave``."""

    def __init__(self, events: list[str], number: int) -> None:
        self.events, self.number = events, number
        self.written, self.error = False, ""

    def is_written(self) -> bool:
        return self.written

    def finish(self) -> Path:
        self.events.append(f"finish {self.number}")
        if self.error:
            raise CheckpointError(self.error)
        return Path()


class Stage:
    """A run whose saves are fake; ``events`` tells what happened."""

    def __init__(self, *, background: bool) -> None:
        self.events: list[str] = []
        self.saves: list[FakeSave] = []
        self.run: Any = mock.MagicMock()
        self.run.context, self.run.base = ParallelContext.single(), None
        self.run.config.checkpoint.async_save = background
        self.run.config.checkpoint.save = "folder"
        self.run.config.checkpoint.overwrite_run = False
        self.run.config.reporting.log_progress = False
        self.run.reporter.say = lambda text: self.events.append(text.split()[0])
        self.run.progress.iteration = 7

    def begin(self, *_: object, background: object, files: object) -> FakeSave:
        self.saves.append(FakeSave(self.events, len(self.saves)))
        self.events.append(f"begin {len(self.saves) - 1}{' in background' if background else ''}")
        return self.saves[-1]

    def prune(self, *_: object) -> None:
        self.events.append("prune")


@pytest.fixture
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    made = Stage(background=getattr(request, "param", True))
    with (
        mock.patch.object(module, "begin_save", made.begin),
        mock.patch.object(module, "prune", made.prune),
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
    assert stage.events == ["saving", "begin 0 in background"]
    stage.saves[0].written = True
    saver.settle()
    assert stage.events[2:] == ["finish 0", "successfully", "prune"]
    saver.settle()
    assert len(stage.events) == 5


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
    stage.saves[0].written, stage.saves[0].error = True, "no space left"
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
