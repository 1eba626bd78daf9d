"""Progress of preprocessing, for people who watch and for logs."""

from __future__ import annotations

import time
from typing import TextIO

from megatron.core.datasets.journal import Totals
from megatron.training.reporting.progress import ProgressBar


class Progress:
    """A bar on a terminal, a line every ``log_interval`` documents elsewhere.

    ``size``: bytes of input on disk, None when unknown. ``done`` and ``bytes_done``: progress of an earlier run that
    this one continues.
    """

    def __init__(
        self, size: int | None, *, log_interval: int, stream: TextIO, done: Totals | None = None, bytes_done: int = 0
    ) -> None:
        self._interval, self._stream = log_interval, stream
        self.bar = ProgressBar(size, initial=bytes_done, counted=False, stream=stream)
        self._start = time.monotonic()
        before = done or Totals()
        self._documents, self._text_bytes, self._tokens = before.documents, before.text_bytes, _tokens(before)
        self._logged = before.documents // log_interval

    def update(self, totals: Totals, bytes_read: int) -> None:
        """Show the progress: always on a bar, every ``log_interval`` documents as a line."""
        if self.bar.enabled:
            rate = (totals.text_bytes - self._text_bytes) / self.seconds / 1e6
            self.bar.show(bytes_read, f"{totals.documents:,} documents", f"{rate:.1f} MB/s")
        elif totals.documents // self._interval > self._logged:
            self._logged = totals.documents // self._interval
            facts = ", ".join(filter(None, (self.rates(totals), self.bar.time_left(bytes_read))))
            print(f"Processed {totals.documents} documents ({facts}).", file=self._stream, flush=True)

    def say(self, line: str) -> None:
        """Print a line in place of the bar."""
        self.bar.clear()
        print(line, file=self._stream, flush=True)

    def rates(self, totals: Totals) -> str:
        """Documents, text and tokens per second since the start."""
        seconds = self.seconds
        return (
            f"{(totals.documents - self._documents) / seconds:.1f} docs/s, "
            f"{(totals.text_bytes - self._text_bytes) / seconds / 1e6:.2f} MB/s, "
            f"{(_tokens(totals) - self._tokens) / seconds:.0f} tokens/s"
        )

    @property
    def seconds(self) -> float:
        """Time since the start, above 0."""
        return max(time.monotonic() - self._start, 1e-9)


def _tokens(totals: Totals) -> int:
    return sum(totals.tokens.values())
