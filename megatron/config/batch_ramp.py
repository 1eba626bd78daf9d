"""The global batch size as a function of consumed samples (``--rampup-batch-size``, ``--step-batch-size-schedule``)."""

from __future__ import annotations

import re
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from itertools import count

from megatron.errors import ConfigError

_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_NUMBER = r"(\d{1,18}(?:\.\d{1,18})?)([KMBT]?)"


@dataclass(frozen=True)
class BatchRamp:
    """A changing batch size: ``sizes[index]`` from ``start_of(index)`` consumed samples on."""

    sizes: Sequence[int]
    start_of: Callable[[int], int]

    @classmethod
    def of_steps(cls, steps: Sequence[tuple[int, int]]) -> BatchRamp:
        """The sizes of pairs (consumed samples, size), the first at 0."""
        starts, sizes = zip(*steps)
        return cls(sizes, starts.__getitem__)

    @classmethod
    def growing(cls, *, start: int, increment: int, samples: int, full: int) -> BatchRamp:
        """A batch size that grows from ``start`` by ``increment`` to ``full``, evenly over ``samples`` samples."""
        sizes = range(start, full + 1, increment) or range(full, full + 1)
        return cls(sizes, partial(_start_of_growth, len(sizes) - 1, samples))

    def size_at(self, consumed_samples: int) -> int:
        """Global batch size of the step that begins after ``consumed_samples`` samples."""
        return self.sizes[self._index_at(consumed_samples)]

    def iterations(self, train_samples: int) -> int:
        """Number of steps of ``train_samples`` samples; samples that do not fill the last batch are not used."""
        steps, left = 0, train_samples
        for size, most in self._phases():
            taken = min(most, left // size)
            steps, left = steps + taken, left - taken * size
            if taken < most:
                break
        return steps

    def samples_after(self, iterations: int) -> int:
        """Samples that ``iterations`` steps from the start consume."""
        samples, left = 0, iterations
        for size, most in self._phases():
            taken = min(most, left)
            samples, left = samples + taken * size, left - taken
            if not left:
                break
        return samples

    def _index_at(self, consumed_samples: int) -> int:
        return bisect_right(range(len(self.sizes)), consumed_samples, key=self.start_of) - 1

    def _phases(self) -> Iterator[tuple[int, int]]:
        """Each batch size with its number of steps; the last size has no end."""
        consumed = index = 0
        while (index := self._index_at(consumed)) < len(self.sizes) - 1:
            size = self.sizes[index]
            steps = -(-(self.start_of(index + 1) - consumed) // size)
            yield size, steps
            consumed += steps * size
        yield self.sizes[index], sys.maxsize


def _start_of_growth(growths: int, samples: int, index: int) -> int:
    """Consumed samples from which Megatron-LM's floating-point division gives ``index`` of ``growths``."""
    if index == 0 or samples == 0:
        return 0
    each = samples / growths
    first = next(consumed for consumed in count(max(int(index * each) - 1, 0)) if consumed / each >= index)
    return min(first, samples + 1)


def read_batch_steps(text: str) -> list[tuple[int, int]]:
    """(threshold, batch size) of each entry of ``--step-batch-size-schedule``, by threshold.

    Raises ConfigError for any other text; the caller puts the flag before its message.
    """
    entries = text.replace(",", " ").split()
    if not entries:
        raise ConfigError("has no entry; give pairs of tokens and batch size, as in '0:768 250B:1536'")
    steps = []
    for entry in entries:
        found = re.fullmatch(f"{_NUMBER}:{_NUMBER}", entry.upper(), re.ASCII)
        threshold, size = (
            (Decimal(found[first]) * _FACTORS[found[first + 1]] for first in (1, 3))
            if found
            else (Decimal(0), Decimal(0))
        )
        if size < 1 or threshold % 1 or size % 1:
            raise ConfigError(
                f"has the entry {entry!r}, which is not TOKENS:BATCH_SIZE, two whole numbers that may end in K, M, B "
                "or T; write it as in '0:768 250B:1536'"
            )
        steps.append((int(threshold), int(size)))
    return sorted(steps)
