"""Who says what, when: the right rank, at the right iterations, with times that mean training and nothing else."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from megatron.config.reporting import ReportingConfig
from megatron.training.reporting.curves import Curves
from megatron.training.reporting.flops import Peak, SpeedScale
from megatron.training.reporting.metrics import StepRecord
from megatron.training.reporting.reporter import Figures, Reporter, ReportingRank
from megatron.training.reporting.timers import Timers


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Recorder:
    def __init__(self) -> None:
        self.points: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.points.append((tag, scalar_value, global_step))

    def add_text(self, tag: str, text_string: str, global_step: int) -> None: ...

    def settings(self, values: Mapping[str, object]) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class Stage:
    """A reporter with a clock that is set by hand, and what it wrote."""

    def __init__(
        self, reporting_rank: ReportingRank | None = None, *, terminal: io.StringIO | None = None, **settings: Any
    ) -> None:
        config = ReportingConfig(**{"log_interval": 2} | settings)
        self.clock, self.out, self.recorder = Clock(), io.StringIO(), Recorder()
        self.reporter = Reporter(
            config,
            reporting_rank or ReportingRank(),
            train_iters=10,
            scale=SpeedScale(flops_per_sample=1e12, tokens_per_sample=100, world_size=1, peak=Peak(8.0, "by hand")),
            timers=Timers(level=config.timing_log_level, clock=self.clock),
            curves=Curves(config, [self.recorder], world_size=1),
            terminal=terminal or io.StringIO(),
            clock=self.clock,
            now=lambda: datetime(2026, 8, 1),
            out=self.out,
        )

    def steps(self, first: int, last: int, *, seconds: float = 1.0) -> None:
        for iteration in range(first, last + 1):
            with self.reporter.timers("forward-backward", level=1):
                self.clock.now += seconds
            record = StepRecord(
                iteration=iteration,
                consumed_samples=4 * iteration,
                global_batch_size=4,
                losses={"lm loss": float(iteration)},
                learning_rate=0.1,
            )
            self.reporter.step(record)

    @property
    def text(self) -> str:
        return self.out.getvalue()

    def elapsed(self) -> list[float]:
        return [float(ms) for ms in re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", self.text)]


def test_a_line_every_interval_with_the_mean_since_the_last() -> None:
    stage = Stage()
    stage.steps(1, 5)
    assert re.findall(r"iteration +(\d+)/", stage.text) == ["2", "4"]
    assert re.findall(r"lm loss: (\S+)", stage.text) == ["1.500000E+00", "3.500000E+00"]
    assert stage.elapsed() == [1000.0, 1000.0]


def test_a_log_that_cannot_be_written_does_not_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    """A full disk under the log file ended training; it is said once, and lines come back with the space."""
    stage = Stage()
    with Path("/dev/full").open("w") as full:
        stage.reporter._out = full
        stage.steps(1, 6)
        stage.reporter._out = stage.out
        stage.steps(7, 8)
        with pytest.raises(OSError, match="No space left"):
            full.close()  # what is still in the buffer
    assert caplog.text.count("the log can't be written (No space left on device)") == 1
    assert re.findall(r"iteration +(\d+)/", stage.text) == ["8"]


def test_memory_is_told_once() -> None:
    stage = Stage()
    stage.steps(1, 6)
    assert stage.text.count("memory (MB)") == 1
    assert "[Rank 0] (after 2 iterations) memory (MB) | resident: " in stage.text


def test_evaluation_and_saving_are_not_training_time() -> None:
    """Otherwise throughput drops whenever a checkpoint is written, and numbers of two runs can't be compared."""
    stage = Stage()
    stage.steps(1, 1)
    with stage.reporter.aside("evaluate"):
        stage.clock.now += 100.0
    stage.steps(2, 2)
    assert stage.elapsed() == [1000.0]
    assert "    evaluate .......................................: (100000.00, 100000.00)\n" in stage.text


def test_setup_is_not_training_time() -> None:
    stage = Stage()
    stage.clock.now += 50.0
    stage.reporter.restart_clock()
    stage.steps(1, 2)
    assert stage.elapsed() == [1000.0]


def test_only_the_last_rank_prints_the_log_but_all_meet_in_the_collectives() -> None:
    meetings: list[Figures] = []

    def gather(times: Figures) -> list[Figures]:
        meetings.append(times)
        return [times, times]

    reporting_rank = ReportingRank(rank=0, world_size=2, is_first_replica=False, gather=gather)
    stage = Stage(reporting_rank, timing_log_level=1)
    stage.steps(1, 2)
    with stage.reporter.aside("evaluate"):
        pass
    stage.reporter.validation("iteration 2", {"lm loss": 1.0}, iteration=2, consumed_samples=8)
    assert stage.text == ""
    assert [list(values) for values in meetings] == [[], ["forward-backward"], ["evaluate"]]


def test_memory_of_the_first_replica_is_printed_by_the_last_rank() -> None:
    """Printed by its own rank, it would land in the middle of the last rank's progress line."""

    def gather(values: Figures) -> list[Figures]:
        return [{"resident": 3.0 * 1024 * 1024}, values]

    stage = Stage(ReportingRank(rank=1, world_size=2, is_first_replica=False, gather=gather))
    stage.steps(1, 2)
    assert re.findall(r"\[Rank (\d)\] \(after 2 iterations\) memory \(MB\) \| resident: 3.0\n", stage.text) == ["0"]


def test_timers_follow_the_line_in_milliseconds_per_iteration() -> None:
    stage = Stage(timing_log_level=1, timing_log_option="max")
    stage.steps(1, 2)
    assert stage.text.endswith(
        "max time across ranks (ms):\n    forward-backward ...............................: 1000.00\n"
    )


def test_throughput_in_the_line_and_under_it() -> None:
    stage = Stage(log_throughput=True)
    stage.steps(1, 2)
    assert "throughput per GPU (TFLOP/s/GPU): 4.0 |" in stage.text
    assert (
        " throughput | tokens/s: 400.0 | model TFLOP/s per device: 4 | MFU: 50.0% of 8 TFLOP/s (by hand) |"
        in stage.text
    )
    quiet = Stage()
    quiet.steps(1, 2)
    assert "throughput" not in quiet.text


def test_times_and_speed_as_curves() -> None:
    stage = Stage(log_timers_to_tensorboard=True, log_throughput=True, timing_log_level=1, tensorboard_log_interval=100)
    stage.steps(1, 2)
    assert stage.recorder.points == [
        ("iteration-time", 1.0, 2),
        ("forward-backward-time", 1.0, 2),
        ("throughput", 4.0, 2),
        ("tokens-per-second", 400.0, 2),
        ("mfu", 0.5, 2),
    ]


def test_memory_as_curves() -> None:
    stage = Stage(log_memory_to_tensorboard=True)
    stage.steps(1, 1)
    assert {"mem-resident-bytes", "mem-max-resident-bytes"} <= {name for name, _, _ in stage.recorder.points}


def test_test_set_losses_are_printed_but_do_not_overwrite_the_validation_curve() -> None:
    stage = Stage()
    stage.reporter.validation("iteration 10 on validation set", {"lm loss": 1.0}, iteration=10, consumed_samples=40)
    stage.reporter.validation("iteration 10 on test set", {"lm loss": 2.0}, iteration=10, consumed_samples=40)
    assert stage.text.count("lm loss value") == 2
    assert ("lm loss validation", 1.0, 10) in stage.recorder.points
    assert all(value != 2.0 for _, value, _ in stage.recorder.points)


class Terminal(io.StringIO):
    @override
    def isatty(self) -> bool:
        return True


def test_terminal_sees_progress_with_time_left_and_the_log_stays_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, now = Terminal(), [0.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    stage = Stage(terminal=terminal)
    stage.reporter.restart_clock(1)
    for step in (2, 3, 4):
        now[0] += 1.0
        stage.steps(step, step)
    assert "3/10 (30%)  loss 3.0000  400 tokens/s  00:07 left" in terminal.getvalue()
    assert "\r" not in stage.text
    stage.reporter.close()
    assert terminal.getvalue().rstrip("\r").endswith(" ")


def test_evaluation_says_how_long_it_will_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Minutes without a word, in the middle of a run."""
    terminal, now = Terminal(), [0.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    stage = Stage(terminal=terminal)
    for _ in stage.reporter.evaluating(range(4), total=4):
        now[0] += 1.0
    assert "1/4 (25%)  evaluation  00:03 left" in terminal.getvalue()
    assert terminal.getvalue().rstrip("\r").endswith(" ")
    for _ in stage.reporter.evaluating(range(2), total=None):
        now[0] += 1.0
    assert "\revaluation, batch 1\r" in terminal.getvalue()
    assert stage.text == ""
