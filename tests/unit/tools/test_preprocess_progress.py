"""Progress of preprocessing: a bar where someone watches, parseable lines where a log is kept."""

from __future__ import annotations

import io

import pytest
from typing_extensions import override

from megatron.core.datasets.journal import Totals
from megatron.preprocessing.progress import Progress


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    @override
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to be set."""
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    return now


def totals(documents: int) -> Totals:
    return Totals(documents=documents, text_bytes=documents * 2_000_000, tokens={"text": documents * 10})


def test_bar_shows_share_rate_and_time_left(clock: list[float]) -> None:
    stream = Terminal()
    progress = Progress(1000, log_interval=1, stream=stream)
    clock[0] += 10.0
    progress.update(totals(50), 250)
    assert stream.getvalue() == "\r━━━━━╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌ 25%  50 documents  10.0 MB/s  00:30 left"


def test_bar_is_not_drawn_for_every_batch(clock: list[float]) -> None:
    """Thousands of small batches a second must not be spent on drawing."""
    stream = Terminal()
    progress = Progress(1000, log_interval=1, stream=stream)
    for _ in range(50):
        clock[0] += 0.01
        progress.update(totals(1), 1)
    assert stream.getvalue().count("\r") <= 5


def test_bar_without_a_known_size(clock: list[float]) -> None:
    """Standard input has no end to count towards."""
    stream = Terminal()
    progress = Progress(None, log_interval=1, stream=stream)
    clock[0] += 1.0
    progress.update(totals(3), 0)
    assert stream.getvalue() == "\r3 documents  6.0 MB/s"


def test_messages_do_not_end_in_half_a_bar(clock: list[float]) -> None:
    stream = Terminal()
    progress = Progress(10, log_interval=1, stream=stream)
    clock[0] += 1.0
    progress.update(totals(3), 5)
    progress.say("skipped a.jsonl:3: the line is empty")
    assert stream.getvalue().endswith("  \rskipped a.jsonl:3: the line is empty\n")


def test_lines_every_so_many_documents(clock: list[float]) -> None:
    """Megatron-LM's words, so that whoever reads logs by machine still can; no control characters."""
    stream = io.StringIO()
    progress = Progress(1000, log_interval=100, stream=stream)
    clock[0] += 2.0
    for documents in (60, 120, 180, 410):
        progress.update(totals(documents), documents)
    assert stream.getvalue().splitlines() == [
        "Processed 120 documents (60.0 docs/s, 120.00 MB/s, 600 tokens/s, 00:14 left).",
        "Processed 410 documents (205.0 docs/s, 410.00 MB/s, 2050 tokens/s, 00:02 left).",
    ]


def test_a_resumed_run_counts_its_own_rate(clock: list[float]) -> None:
    """What an earlier run did in no time would make the rate look absurd and the time left too short."""
    stream = io.StringIO()
    progress = Progress(1000, log_interval=100, stream=stream, done=totals(500), bytes_done=500)
    clock[0] += 10.0
    progress.update(totals(600), 600)
    assert stream.getvalue() == "Processed 600 documents (10.0 docs/s, 20.00 MB/s, 100 tokens/s, 00:40 left).\n"
