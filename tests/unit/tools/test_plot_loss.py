"""A picture of the wrong numbers is worse than none: logs and events are read for what they say."""

from __future__ import annotations

import builtins
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from megatron.config.reporting import ReportingConfig
from megatron.errors import ConfigError, DataError
from megatron.training.reporting.curves import Curves, open_writers
from megatron.training.reporting.metrics import (
    IntervalTotals,
    StepRecord,
    training_line,
    validation_block,
)
from tests.harness.sentences import expect_error
from tools.plot_loss import main, read_losses, trend

TRAIN = {10: 8.5, 20: 7.25, 30: 6.5}
VALIDATION = {20: 7.5}


def step(iteration: int, loss: float) -> StepRecord:
    return StepRecord(
        iteration=iteration,
        consumed_samples=iteration * 8,
        global_batch_size=8,
        losses={"lm loss": loss},
        learning_rate=1e-3,
        grad_norm=1.0,
    )


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log as the reporter writes it, between other output, with a line repeated after a restart."""
    lines = ["W0801 torchrun says something"]
    for iteration, loss in [(10, 9.9), *TRAIN.items()]:
        totals = IntervalTotals()
        totals.add(step(iteration, loss))
        now, last = datetime(2026, 8, 1), step(iteration, loss)
        lines.append(training_line(last, totals, time=now, train_iters=30, seconds_per_iteration=0.1))
    lines.append(validation_block("iteration 20", {"lm loss": 7.5}))
    lines.append(validation_block("iteration 30 on test set", {"lm loss": 1.5}))
    path = tmp_path / "train.log"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def events(tmp_path: Path) -> Path:
    pytest.importorskip("tensorboard", reason="the tensorboard package is optional")
    folder = tmp_path / "tensorboard"
    config = ReportingConfig(tensorboard_dir=str(folder))
    board = Curves(config, open_writers(config, save=None), world_size=1)
    for iteration, loss in TRAIN.items():
        board.step(step(iteration, loss))
    board.validation({"lm loss": 7.5}, iteration=20, consumed_samples=160)
    board.close()
    return folder


@pytest.mark.parametrize("source", ["log", "events"])
def test_reads_training_and_validation_losses(source: str, request: pytest.FixtureRequest) -> None:
    """From the log the restarted iteration counts; the test set is not validation."""
    losses = read_losses(request.getfixturevalue(source))
    assert (losses.name, losses.train, losses.validation) == ("lm loss", TRAIN, VALIDATION)


def test_another_curve_is_read_by_its_name(events: Path, log: Path) -> None:
    """How evenly experts are used is a curve of TensorBoard alone; a name that isn't there never draws another."""
    rates = read_losses(events, name="learning-rate")
    assert rates.name == "learning-rate" and not rates.validation
    assert rates.train == pytest.approx(dict.fromkeys(TRAIN, 1e-3))
    with expect_error(DataError, "moe/max_violation"):
        read_losses(events, name="moe/max_violation")
    with expect_error(ConfigError, "--curve learning-rate", "TensorBoard's"):
        read_losses(log, name="learning-rate")


def test_draws_several_runs_into_one_picture(
    log: Path, events: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is an optional dependency")
    output = tmp_path / "pictures" / "loss.png"
    assert main([str(log), str(events), "--output", str(output), "--title", "two runs"]) == 0
    assert output.read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert (
        "train: training lm loss from 8.50 (iteration 10) to 6.88 (30), validation lm loss from 7.50 (iteration 20)"
        in said
    )


def test_missing_matplotlib_is_one_sentence(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def refuse(name: str, *args: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(name)
        return real_import(name, *args)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with expect_error(ConfigError):
        main([str(log), "--output", "never.png"])


def test_a_picture_that_cannot_be_written_is_one_sentence(log: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is an optional dependency")
    with expect_error(ConfigError, "--output", "loss.xyz"):
        main([str(log), "--output", str(tmp_path / "loss.xyz")])


@pytest.mark.parametrize("name", ["missing", "empty.log"])
def test_a_source_without_losses_is_one_sentence(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty.log").write_text("nothing here\n")
    with expect_error(DataError):
        read_losses(tmp_path / name)


def test_trend_is_smooth_undelayed_and_starts_where_the_curve_starts() -> None:
    line = [float(value) for value in range(100, 0, -1)]
    smooth = trend(line)
    assert smooth[0] == 100.0
    assert smooth[10:90] == pytest.approx(line[10:90])
    noisy = [5.0 + (-1) ** index for index in range(1000)]
    assert max(trend(noisy)[100:]) < 5.1
