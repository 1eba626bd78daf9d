"""The progress line is for eyes: on a terminal it must not wrap or linger, elsewhere it must not exist."""

from __future__ import annotations

import io

import pytest

from megatron.training.reporting.progress import ProgressLine, Work, duration, progress_text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0:00"),
        (42.4, "0:42"),
        (59.6, "1:00"),
        (725, "12:05"),
        (11220, "3:07:00"),
        (86400 * 2 + 4 * 3600, "2d 04:00"),
    ],
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def text(width: int = 200, iteration: int = 120) -> str:
    return progress_text(Work(iteration, 480), "loss 4.2500", "12,346 tokens/s", seconds_left=83, width=width)


def test_says_how_far_how_good_how_fast_and_how_long() -> None:
    assert text() == "━━━━━╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌ 120/480 (25%)  loss 4.2500  12,346 tokens/s  1:23 left"


def test_never_wraps() -> None:
    for width in range(120):
        assert len(text(width)) < max(width, 1)


def show(line: ProgressLine, iteration: int) -> None:
    line.show(Work(iteration, 480), seconds_left=1.0)


def test_a_pipe_gets_nothing() -> None:
    pipe = io.StringIO()
    line = ProgressLine(stream=pipe)
    show(line, 1)
    line.clear()
    assert pipe.getvalue() == ""


def test_drawn_at_most_ten_times_a_second_and_cleared_without_a_trace() -> None:
    terminal, now = Terminal(), [0.0]
    line = ProgressLine(stream=terminal, clock=lambda: now[0])
    for step in range(1, 21):
        show(line, step)
        now[0] += 0.0625
    assert terminal.getvalue().count("\r") == 10
    line.clear()
    line.clear()
    assert terminal.getvalue().endswith("\r\x1b[K")
    assert terminal.getvalue().count("\r") == 11


def test_comes_back_only_when_a_line_printed_through_a_pipe_has_arrived() -> None:
    """``pretrain_gpt.py … | tee log`` on a terminal: redrawn at once, the bar would stand before the log line."""
    terminal, now = Terminal(), [0.0]
    line = ProgressLine(stream=terminal, clock=lambda: now[0])
    show(line, 1)
    now[0] = 1.0
    line.clear()
    cleared = terminal.getvalue()
    show(line, 2)
    assert terminal.getvalue() == cleared
    now[0] = 1.125
    show(line, 3)
    assert "3/480" in terminal.getvalue()


def test_other_ranks_stay_silent() -> None:
    terminal = Terminal()
    show(ProgressLine(stream=terminal, enabled=False), 1)
    assert terminal.getvalue() == ""
