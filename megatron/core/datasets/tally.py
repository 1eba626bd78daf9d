"""What a preprocessing run has done so far: counts, and how long documents are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

_EXACT_BITS = 12


@dataclass
class LengthHistogram:
    """How many documents have how many tokens: exact up to 4,095, longer ones to 12 binary digits.

    ``longest`` is exact.
    """

    counts: dict[int, int] = field(default_factory=dict)
    longest: int = 0

    def add(self, lengths: NDArray[np.int64]) -> None:
        """Count documents."""
        self.longest = max(self.longest, int(lengths.max(initial=0)))
        values, times = np.unique(_rounded(lengths), return_counts=True)
        for value, count in zip(values.tolist(), times.tolist()):
            self.counts[value] = self.counts.get(value, 0) + count

    def percentiles(self, *shares: float) -> list[int]:
        """The least length that ``share`` of 100 documents don't exceed, for each share; none without documents."""
        values = np.array(sorted(self.counts), np.int64)
        reached = np.cumsum([self.counts[value] for value in values.tolist()])
        if not len(values):
            return []
        places = np.searchsorted(reached, np.array(shares) / 100 * reached[-1])
        return [self.longest if share == 100 else int(values[place]) for share, place in zip(shares, places)]


def _rounded(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    digits = np.frexp(lengths.astype(np.float64))[1]
    shift = np.maximum(digits - _EXACT_BITS, 0)
    rounded: NDArray[np.int64] = lengths >> shift << shift
    return rounded


@dataclass
class Tally:
    """``tokens`` and ``lengths`` by key; ``empty``: texts without a token; ``bad``: lines that hold no document."""

    documents: int = 0
    empty: int = 0
    bad: int = 0
    text_bytes: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    lengths: dict[str, LengthHistogram] = field(default_factory=dict)

    def add_documents(self, key: str, lengths: NDArray[np.int64]) -> None:
        """Count the documents of one key by their lengths in tokens."""
        self.empty += int(np.count_nonzero(lengths == 0))
        self.tokens[key] = self.tokens.get(key, 0) + int(lengths.sum())
        self.lengths.setdefault(key, LengthHistogram()).add(lengths)

    def to_json(self) -> dict[str, Any]:
        """All of it, for a file."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Tally:
        """What ``to_json`` described."""
        lengths = {
            key: LengthHistogram({int(value): count for value, count in each["counts"].items()}, each["longest"])
            for key, each in saved["lengths"].items()
        }
        return cls(**{**saved, "lengths": lengths})
