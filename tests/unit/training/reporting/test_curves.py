"""Curve names are an interface: people's dashboards select them by name."""

from __future__ import annotations

import builtins
import resource
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron.config.reporting import ReportingConfig
from megatron.errors import ConfigError
from megatron.training.reporting.curves import Curves, open_tensorboard, open_writers
from megatron.training.reporting.metrics import StepRecord
from tests.harness.sentences import check_line, expect_error

STEP = StepRecord(
    iteration=4,
    consumed_samples=64,
    global_batch_size=16,
    losses={"lm loss": 5.5},
    learning_rate=1e-3,
    loss_scale=8.0,
    grad_norm=1.5,
    num_zeros=3,
    params_norm=20.0,
)


class Recorder:
    def __init__(self) -> None:
        self.points: dict[str, tuple[float, int]] = {}
        self.texts: dict[str, str] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.points[tag] = (scalar_value, global_step)

    def add_text(self, tag: str, text_string: str, global_step: int) -> None:
        self.texts[tag] = text_string

    def settings(self, values: Mapping[str, object]) -> None:
        self.texts |= {name: str(value) for name, value in values.items()}

    def flush(self) -> None: ...

    def close(self) -> None: ...


def curves(**settings: Any) -> tuple[Recorder, Curves]:
    recorder = Recorder()
    return recorder, Curves(ReportingConfig(**settings), [recorder], world_size=8)


def test_every_name_of_a_step() -> None:
    recorder, board = curves(log_world_size_to_tensorboard=True)
    board.step(STEP)
    values = {
        "learning-rate": 1e-3,
        "batch-size": 16,
        "lm loss": 5.5,
        "loss-scale": 8.0,
        "world-size": 8,
        "grad-norm": 1.5,
        "num-zeros": 3,
        "params-norm": 20.0,
    }
    expected = {name: (value, 4) for name, value in values.items()}
    expected |= {f"{name} vs samples": (value, 64) for name, value in values.items()}
    assert recorder.points == expected


def test_flags_take_curves_away() -> None:
    recorder, board = curves(log_loss_scale_to_tensorboard=False)
    board.step(StepRecord(iteration=1, consumed_samples=8, global_batch_size=8, losses={}, learning_rate=0.0))
    names = {name for name in recorder.points if not name.endswith("vs samples")}
    assert names == {"learning-rate", "batch-size"}


def test_interval() -> None:
    recorder, board = curves(tensorboard_log_interval=3)
    board.step(STEP)
    assert recorder.points == {}
    assert board.wants(6)
    assert not board.wants(7)


@pytest.mark.parametrize("with_ppl", [False, True])
def test_validation_names(with_ppl: bool) -> None:
    recorder, board = curves(log_validation_ppl_to_tensorboard=with_ppl)
    board.validation({"lm loss": 0.0}, iteration=10, consumed_samples=160)
    expected = {"lm loss validation": (0.0, 10), "lm loss validation vs samples": (0.0, 160)}
    if with_ppl:
        expected |= {"lm loss validation ppl": (1.0, 10), "lm loss validation ppl vs samples": (1.0, 160)}
    assert recorder.points == expected


def test_settings_are_texts() -> None:
    recorder, board = curves()
    board.settings({"lr": 0.1, "save": None})
    assert recorder.texts == {"lr": "0.1", "save": "None"}


def test_without_a_writer_nothing_happens() -> None:
    """Every rank but the last, and every run without a folder, calls the same methods."""
    board = Curves(ReportingConfig(), open_writers(ReportingConfig(), save=None), world_size=1)
    board.step(STEP)
    board.validation({"lm loss": 1.0}, iteration=1, consumed_samples=1)
    board.scalars({"x": 1.0}, iteration=1)
    board.settings({"x": 1})
    board.close()
    assert not board.wants(1)


def test_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real_import = builtins.__import__

    def refuse(name: str, *args: Any) -> Any:
        if "tensorboard" in name:
            raise ModuleNotFoundError(name)
        return real_import(name, *args)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with expect_error(ConfigError, "--tensorboard-dir"):
        open_tensorboard(ReportingConfig(tensorboard_dir=str(tmp_path)))


def test_unwritable_folder_is_one_sentence(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with expect_error(ConfigError, "--tensorboard-dir", "file/sub"):
        open_tensorboard(ReportingConfig(tensorboard_dir=str(blocked / "sub")))


def test_a_disk_that_is_full_at_the_start_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart ended with the code of a user's mistake, so that its job gave up, below a traceback of the thread."""
    tracebacks: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", tracebacks.append)
    pytest.importorskip("tensorboard", reason="the tensorboard package is optional")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
        assert open_tensorboard(ReportingConfig(tensorboard_dir=str(tmp_path))) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caplog.messages == [
        f"--tensorboard-dir {tmp_path} cannot be written (File too large): training continues without its curves; they "
        "resume when the run is restarted"
    ]
    assert tracebacks == []


def test_event_files_can_be_read_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the tensorboard package is optional")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = ReportingConfig(tensorboard_dir=str(tmp_path))
    board = Curves(config, open_writers(config, save=None), world_size=1)
    board.step(STEP)
    board.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(point.step, point.value) for point in events.Scalars("lm loss vs samples")] == [(64, 5.5)]


def test_a_full_disk_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event file's thread failed, and training ended with its error at a later point, or showed its traceback."""
    tracebacks: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", tracebacks.append)
    pytest.importorskip("tensorboard", reason="the tensorboard package is optional")
    config = ReportingConfig(tensorboard_dir=str(tmp_path), tensorboard_queue_size=1)
    writer = open_tensorboard(config)
    assert writer is not None
    recorder = Recorder()
    board = Curves(config, [writer, recorder], world_size=1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (500, before[1])
        )  # the kernel's answer is an OSError, as of a full disk
        for _ in range(100):
            board.step(STEP)
            time.sleep(0.001)  # the thread's turn
        board.validation({"lm loss": 1.5}, iteration=9, consumed_samples=99)
        board.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert tracebacks == []
    other = threading.Thread(target=lambda: 1 / 0)
    other.start()
    other.join()
    assert [each.exc_type for each in tracebacks] == [ZeroDivisionError], "those of other threads are shown"
    assert caplog.text.count("TensorBoardWriter failed") == 1
    check_line(caplog.text, "large")
    check_line(caplog.text, "restarted")
    assert recorder.points["lm loss validation"] == (1.5, 9), "the other writer goes on"
