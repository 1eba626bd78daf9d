"""The same documents train, validate and test as in Megatron-LM: else a comparison trains on its test set."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from megatron.core.datasets.splits import SPLITS, Share, SplitSizes, parse_split
from megatron.errors import ConfigError
from tests.harness.sentences import expect_error


def test_shares_equal_recorded_ones(golden: dict[str, Any]) -> None:
    """Proportions in any unit, with or without spaces, with shares of nothing."""
    for text, recorded in golden["splits"].items():
        shares = [None if share is None else [share.low, share.high] for share in parse_split(text).values()]
        assert shares == recorded["matrix"], text


@pytest.mark.parametrize("text", ["969,30,1", "1,1,1", "99,1,0", "0.5, 0.25, 0.25", "100", "3/2/1"])
def test_every_document_belongs_to_one_split(text: str) -> None:
    """None is lost between two shares, and none trains and validates."""
    shares = parse_split(text)
    for count in range(200):
        ranges = [share.units(count) for share in shares.values() if share is not None]
        assert list(itertools.chain(*ranges)) == list(range(count))


def test_halves_round_to_even() -> None:
    """Python's rounding decides which of two splits gets a document: 2.5 becomes 2, and 3.5 becomes 4."""
    assert Share(0.0, 0.5).units(5) == range(2)
    assert Share(0.0, 0.5).units(7) == range(4)


@pytest.mark.parametrize("text", ["", "all", "0,0,0", "1,1,1,1", "1.2.3"])
def test_a_split_that_says_nothing_is_refused(text: str) -> None:
    """The message shows the value and a form that works."""
    with expect_error(ConfigError, f"--split '{text}'", "969,30,1"):
        parse_split(text)


def test_sizes_of_a_run() -> None:
    """One validation for each interval and one at the end; the test set once."""
    sizes = SplitSizes.of_run(
        train_samples=8000, train_iters=1000, eval_interval=300, eval_iters=10, global_batch_size=8
    )
    assert [sizes.of(split) for split in SPLITS] == [8000, 4 * 10 * 8, 10 * 8]
