"""Counts of a preprocessing run: exact, small, and the same after a stop."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest

from megatron.core.datasets.journal import LengthHistogram, Totals
from megatron.errors import DataError
from megatron.small_files import as_kind


@pytest.mark.parametrize("longest", [10, 5_000, 3_000_000])
def test_percentiles(longest: int) -> None:
    """Exact for ordinary documents; long ones to one part in 2,048, in a table that never grows large."""
    lengths = np.random.default_rng(0).integers(0, longest, 20_000)
    histogram = LengthHistogram()
    for part in np.array_split(lengths, 7):
        histogram.add(part)
    shares = (0, 1, 10, 50, 90, 99, 100)
    expected = np.percentile(lengths, shares, method="inverted_cdf")
    for found, value in zip(histogram.percentiles(*shares), expected.tolist()):
        assert value * (1 - 2**-11) <= found <= value
        assert found == value or value > 4095
    assert histogram.percentiles(100) == [lengths.max()]
    assert len(histogram.counts) < 30_000


def test_without_documents() -> None:
    assert LengthHistogram().percentiles(0, 50) == []


def test_json_round_trip() -> None:
    """An interrupted run's counts come back from a file, whose keys are text."""
    totals = Totals(documents=3, bad=1)
    totals.add_documents("text", np.array([0, 5, 5]))
    saved = json.loads(json.dumps(asdict(totals)))
    assert as_kind(saved, Totals, where="the journal", error=DataError) == totals
    assert (totals.empty, totals.tokens) == (1, {"text": 10})
