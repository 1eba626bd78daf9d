"""Timers are compared between runs and parsed by scripts: levels, sums over ranks and columns must hold."""

from __future__ import annotations

import pytest

from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.mesh import Mesh
from megatron.training.reporting.timers import Timers, TimingOption, longest, timer_report
from tests.harness.runs import tiny_run


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("level", "measured"), [(0, {"evaluate"}), (1, {"evaluate", "optimizer"}), (2, {"evaluate", "optimizer", "send"})]
)
def test_finer_timers_are_off(level: int, measured: set[str]) -> None:
    timers = Timers(level=level)
    for name, its_level in (("evaluate", 0), ("optimizer", 1), ("send", 2)):
        with timers(name, level=its_level):
            pass
    assert set(timers.take()) == measured


def test_time_accumulates_until_taken_and_then_starts_from_zero() -> None:
    clock = Clock()
    timers = Timers(level=1, clock=clock)
    for _ in range(3):
        with timers("forward-backward", level=1):
            clock.now += 2.0
    with timers("optimizer", level=1):
        clock.now += 1.0
    assert timers.take("optimizer", "never-ran") == {"optimizer": 1.0}
    assert timers.take() == {"forward-backward": 6.0}
    assert timers.take() == {}


def test_time_counts_when_the_timed_code_raises() -> None:
    clock = Clock()
    timers = Timers(clock=clock)

    def fail() -> None:
        clock.now += 1.0
        raise KeyError

    with pytest.raises(KeyError), timers("evaluate", level=0):
        fail()
    assert timers.take() == {"evaluate": 1.0}


def test_device_is_waited_for_at_both_ends_and_ranks_before_level_one() -> None:
    """Otherwise a time on a GPU is that of launching kernels, and one rank's wait for another hides in its compute."""
    calls: list[str] = []
    timers = Timers(level=2, synchronize=lambda: calls.append("device"), barrier=lambda: calls.append("ranks"))
    with timers("optimizer", level=1):
        calls.append("work")
    with timers("send", level=2):
        calls.append("work")
    assert calls == ["ranks", "device", "work", "device", "device", "work", "device"]


RANKS = [{"forward-backward": 1.0, "optimizer": 0.25}, {"forward-backward": 2.0}]


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        (
            "minmax",
            [
                "(min, max) time across ranks (ms):",
                "    forward-backward ...............................: (100.00, 200.00)",
                "    optimizer ......................................: (25.00, 25.00)",
            ],
        ),
        (
            "max",
            [
                "max time across ranks (ms):",
                "    forward-backward ...............................: 200.00",
                "    optimizer ......................................: 25.00",
            ],
        ),
        (
            "all",
            [
                "times across ranks (ms):",
                "  forward-backward:",
                "     rank  0: 100.00",
                "     rank  1: 200.00",
                "  optimizer:",
                "     rank  0: 25.00",
            ],
        ),
    ],
)
def test_report_to_the_letter(option: TimingOption, expected: list[str]) -> None:
    """Milliseconds per iteration; a rank on which a timer didn't run doesn't drag its minimum to zero."""
    assert timer_report(RANKS, option=option, iterations=10).split("\n") == expected


def test_name_column_is_48_wide_after_four_spaces() -> None:
    label = timer_report([{"x": 1.0}], option="max").split("\n")[1].partition(":")[0]
    assert len(label) == 4 + 48


def test_nothing_timed_prints_nothing() -> None:
    assert timer_report([{}, {}], option="minmax") == ""


def test_curves_show_the_slowest_rank() -> None:
    assert longest(RANKS, iterations=10) == {"forward-backward": 0.2, "optimizer": 0.025}


@pytest.mark.parametrize(("flags", "waits"), [("", 1), ("--no-barrier-with-level-1-timing", 0)])
def test_runs_wait_for_all_ranks_unless_told_not_to(flags: str, waits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of level 1 would hold the wait for slower ranks, or barriers that nobody wants slow a run."""
    waited: list[Mesh] = []
    monkeypatch.setattr("megatron.training.run.run.barrier", waited.append)
    timers = tiny_run(ParallelContext.single(), f"--mock-data --timing-log-level 1 {flags}").reporter.timers
    with timers("optimizer", level=1):
        pass
    assert len(waited) == waits
