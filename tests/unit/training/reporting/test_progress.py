"""The progress bar is for eyes: on a terminal it must not wrap or linger, elsewhere it must not exist."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
from collections.abc import Callable

import pytest
from typing_extensions import override

from megatron.training.reporting.progress import ProgressBar
from tests.architecture.source_tree import ROOT


class Terminal(io.StringIO):
    @override
    def isatty(self) -> bool:
        return True


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to be set."""
    set_by_hand = [100.0]
    read: Callable[[], float] = lambda: set_by_hand[0]  # noqa: E731
    monkeypatch.setattr("tqdm.std.time", read)
    monkeypatch.setattr("time.monotonic", read)
    return set_by_hand


def test_says_how_far_how_good_how_fast_and_how_long(now: list[float]) -> None:
    """A resumed run's speed is its own: 20 iterations in 4 s, not 120."""
    terminal = Terminal()
    bar = ProgressBar(480, initial=100, stream=terminal)
    now[0] += 4
    bar.show(120, "loss 4.2500", "12,346 tokens/s")
    assert terminal.getvalue() == "\r━━━━━╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌ 120/480 (25%)  loss 4.2500  12,346 tokens/s  01:12 left"


def test_other_work_does_not_count_for_the_speed(now: list[float]) -> None:
    """After an evaluation of an hour the time left must not be that of slow steps."""
    terminal = Terminal()
    bar = ProgressBar(480, stream=terminal)
    for step in range(1, 11):
        now[0] += 1
        bar.show(step)
    now[0] += 3600
    bar.leave_out(3600)
    now[0] += 1
    bar.show(11)
    assert terminal.getvalue().endswith("07:49 left")


def test_never_wraps() -> None:
    """The width is that of the terminal it is drawn on."""
    if not hasattr(os, "openpty"):
        pytest.skip("needs a pseudo-terminal")
    import fcntl
    import termios

    screen, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 30, 0, 0))
    code = (
        "from megatron.training.reporting.progress import ProgressBar; import time; bar = ProgressBar(480); "
        "time.sleep(0.11); bar.show(120, 'loss 4.2500', 'x' * 200); import os; os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code], stderr=terminal, cwd=ROOT, check=True, timeout=600)
    os.close(terminal)
    drawn = os.read(screen, 10_000).decode()
    os.close(screen)
    assert "120/4" in drawn
    assert max(map(len, drawn.split("\r"))) <= 30


def test_a_pipe_gets_nothing(now: list[float]) -> None:
    pipe = io.StringIO()
    bar = ProgressBar(480, stream=pipe)
    now[0] += 1
    bar.show(1)
    bar.clear()
    assert pipe.getvalue() == ""
    assert not bar.enabled


def test_drawn_at_most_ten_times_a_second_and_cleared_without_a_trace(now: list[float]) -> None:
    terminal = Terminal()
    bar = ProgressBar(480, stream=terminal)
    for step in range(1, 21):
        now[0] += 0.0625
        bar.show(step)
    assert terminal.getvalue().count("left") == 10
    bar.clear()
    width = len("━╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌ 20/480 (4%)    00:28 left")
    assert terminal.getvalue().endswith("\r" + " " * width + "\r")


def test_comes_back_only_when_a_line_printed_through_a_pipe_has_arrived(now: list[float]) -> None:
    """``pretrain_gpt.py … | tee log`` on a terminal: redrawn at once, the bar would stand before the log line."""
    terminal = Terminal()
    bar = ProgressBar(480, stream=terminal)
    now[0] += 1
    bar.show(1)
    now[0] += 1
    bar.clear()
    cleared = terminal.getvalue()
    bar.show(2)
    assert terminal.getvalue() == cleared
    now[0] += 0.125
    bar.show(3)
    assert "3/480" in terminal.getvalue()


def test_other_ranks_stay_silent(now: list[float]) -> None:
    terminal = Terminal()
    bar = ProgressBar(480, stream=terminal, enabled=False)
    now[0] += 1
    bar.show(1)
    assert terminal.getvalue() == ""


def test_no_thread_and_no_lock_between_processes(now: list[float]) -> None:
    """Data loaders fork; a fork beside tqdm's monitoring thread may inherit a lock that nobody releases."""
    from tqdm import tqdm

    bar = ProgressBar(480, stream=Terminal())
    now[0] += 1
    bar.show(1)
    assert type(bar._bar).monitor is None
    assert type(bar._bar).get_lock() is not tqdm.get_lock()
