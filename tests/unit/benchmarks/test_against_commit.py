"""The interval that a comparison with an earlier commit prints."""

from __future__ import annotations

from benchmarks.against_commit import interval


def test_ranks_of_the_interval() -> None:
    """Those of the sign test: the two lowest and the two highest of eleven rounds can be left out, none of six."""
    for count, low, high in ((1, 0, 0), (5, 0, 4), (6, 0, 5), (9, 1, 7), (11, 1, 9), (12, 2, 9), (20, 5, 14)):
        assert interval([float(value) for value in reversed(range(count))]) == (low, high), count
