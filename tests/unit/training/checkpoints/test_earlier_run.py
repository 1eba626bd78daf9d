"""Two runs are never mixed in one save folder, and an overwritten one is there until the new one is durable."""

from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path
from unittest import mock

import pytest

from megatron.core.checkpointing import save
from megatron.core.checkpointing.find import find_checkpoint, whole_checkpoints
from megatron.core.files.remote_path import path_of
from megatron.core.models.registry import FAMILIES
from megatron.core.parallel.context import ParallelContext
from megatron.errors import CheckpointError, ConfigError
from megatron.training.checkpoints import loading
from megatron.training.checkpoints.earlier_run import check_save_folder
from megatron.training.checkpoints.saving import Saver
from megatron.training.loop import train_from_start_to_end
from megatron.training.pretrain import pretrain
from tests.harness.bucket import url
from tests.harness.runs import TINY_RUN, tiny_config, tiny_run
from tests.harness.sentences import check_line, expect_error

GPT = FAMILIES["gpt"].train_spec


def train(flags: str) -> None:
    """Run a command's flags on one rank, from start to end."""
    config = tiny_config(f"--mock-data --save-interval 2 {flags}")
    train_from_start_to_end(config, GPT, ParallelContext.single(), started=0.0)


def saved(place: str, *iterations: int) -> None:
    """Leave checkpoints of a run at ``iterations`` in a folder or at a URL."""
    run = tiny_run(ParallelContext.single(), f"--mock-data --save {place} --save-interval 1")
    for iteration in iterations:
        run.progress.iteration = iteration
        Saver(run).save()


@pytest.fixture(params=["folder", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder with a run at iterations 4 and 6, on a disk or in object storage."""
    place = str(tmp_path / "run") if request.param == "folder" else url(tmp_path / "run")
    saved(place, 4, 6)
    return place


def iterations(place: str) -> list[int]:
    """Iterations of the whole checkpoints, in order, the one that a resumed run would take last."""
    held = sorted(whole_checkpoints(path_of(place)))
    assert find_checkpoint(place).iteration == held[-1]
    return held


@pytest.mark.parametrize(
    "start",
    ["", "--load {other}", "--finetune --load {place}", "--finetune --load {other}", "--pretrained-checkpoint {other}"],
)
def test_a_run_is_not_started_over_another(place: str, start: str, tmp_path: Path) -> None:
    """A forgotten --load started at 0 beside iteration 6, wrote 2 and 4 there, and moved the tracker back to them."""
    saved(str(tmp_path / "other"), 2)
    flags = f"--save {place} {start.format(place=place, other=tmp_path / 'other')}"
    with expect_error(CheckpointError):
        train(flags)
    assert iterations(place) == [4, 6]


def test_the_dry_run_says_it_too(tmp_path: Path) -> None:
    """A job was approved by its dry run, waited for its place, and was refused at its start."""
    saved(str(tmp_path), 6)
    argv = f"{TINY_RUN} --mock-data --train-iters 9 --save {tmp_path} --save-interval 3 --dry-run".split()
    with expect_error(ConfigError, f"--save {tmp_path}", "6"):
        pretrain(FAMILIES["gpt"], [*argv, "--tokenizer-type", "NullTokenizer"], prog="pretrain_gpt.py")


def test_a_restarted_command_goes_on(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A Slurm job names one folder in --save and --load: empty at first, its own run at each restart."""
    train(f"--save {place} --load {place} --train-iters 8 --override-opt_param-scheduler")
    assert iterations(place) == [4, 6, 8]
    train(f"--save {place}/new --load {place}/new --train-iters 2")
    assert iterations(f"{place}/new") == [2]
    assert "holds" not in capsys.readouterr().out


def test_evaluation_beside_a_run(place: str) -> None:
    """Nothing is saved with --skip-train, so nothing is mixed."""
    assert (
        check_save_folder(tiny_config(f"--mock-data --save {place} --save-interval 1 --skip-train --eval-iters 1"))
        == ""
    )


def test_a_run_that_moves_on_is_only_told(place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that was copied to a faster disk at iteration 6 saves 8 beside 4 and 6: nothing moves back."""
    saved(str(tmp_path / "fast"), 6)
    train(f"--save {place} --load {tmp_path / 'fast'} --train-iters 8 --override-opt_param-scheduler")
    assert iterations(place) == [4, 6, 8]
    check_line(capsys.readouterr().out, f"--save {place}", "iteration 6")


def test_an_overwritten_run_goes_when_the_new_one_is_durable(place: str) -> None:
    """Iterations of both runs in one folder: a resumed run took the wrong one's after --keep-last-checkpoints."""
    train(f"--save {place} --overwrite-run --train-iters 4")
    assert iterations(place) == [2, 4]


def test_nothing_is_lost_before(place: str) -> None:
    """A new run that ends before its first checkpoint is complete leaves the earlier run as it was."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "disk")
    with mock.patch.object(save, "write_durably", side_effect=full), expect_error(CheckpointError, exit_code=1):
        train(f"--save {place} --overwrite-run --train-iters 4")
    assert iterations(place) == [4, 6]


def test_weights_of_the_run_that_is_overwritten(place: str) -> None:
    """--finetune from the folder itself reads its weights before they are deleted."""
    train(f"--save {place} --load {place} --finetune --overwrite-run --train-iters 2")
    assert iterations(place) == [2]


def test_checkpoints_of_another_program_are_not_deleted(tmp_path: Path) -> None:
    """Weeks of a Megatron-LM run were in the folder that was mistyped."""
    (tmp_path / "iter_0000009").mkdir()
    (tmp_path / "iter_0000009" / "common.pt").touch()
    for flag in ("", "--overwrite-run"):
        with expect_error(CheckpointError, "iter_0000009" if flag else tmp_path):
            train(f"--save {tmp_path} {flag}")
    assert (tmp_path / "iter_0000009" / "common.pt").exists()


@pytest.mark.parametrize(
    "flags",
    [
        "--overwrite-run",
        "--overwrite-run --save {0} --save-interval 1 --load {0}",
    ],
)
def test_flags_that_say_two_things(flags: str, tmp_path: Path) -> None:
    """A restarted job with both flags would delete what it had saved, or not: nobody could know."""
    with expect_error(ConfigError):
        tiny_config(f"--mock-data {flags.format(tmp_path)}")


def test_a_longer_run_is_told_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To go on with more --train-iters one needed a flag of Megatron-LM's whose name says nothing of that."""
    train(f"--save {tmp_path} --load {tmp_path} --train-iters 2")
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", "--load", "my runs", "--train-iters", "4"])
    command = "python pretrain_gpt.py --load 'my runs' --train-iters 4 --override-opt_param-scheduler"
    with expect_error(ConfigError, command):
        train(f"--save {tmp_path} --load {tmp_path} --train-iters 4")


def test_a_longer_run_of_several_ranks_is_told_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The words of torchrun are not among those that a rank sees."""
    config = dataclasses.replace(tiny_config("--mock-data"), world_size=2)
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", "--train-iters", "4"])
    monkeypatch.setattr(loading, "resumed_schedule", mock.Mock(side_effect=ConfigError("differs")))
    command = "pretrain_gpt.py --train-iters 4 --override-opt_param-scheduler"
    with expect_error(ConfigError, command):
        loading.schedule_to_follow(config, mock.Mock(), {})
