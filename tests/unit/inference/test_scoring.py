"""Perplexity must count every token once, with as much context as promised, whatever the batch."""

from __future__ import annotations

import itertools
import math

import pytest

from megatron.core.inference.scoring import TextScore, Window, perplexity, samples_of, windows


def test_every_prediction_is_scored_once_with_the_promised_context() -> None:
    """All small sizes: a gap or an overlap would silently change every published number."""
    for total, length in itertools.product(range(40), range(1, 12)):
        for stride in range(1, length + 1):
            scored: list[int] = []
            for window in windows(total, length=length, stride=stride):
                assert 0 <= window.start <= window.first_scored < window.stop <= total
                assert window.stop - window.start <= length
                if window.start > 0:
                    assert window.first_scored - window.start >= length - stride
                scored += range(window.first_scored, window.stop)
            assert scored == list(range(total))


def test_windows_by_hand() -> None:
    assert list(windows(10, length=4, stride=3)) == [Window(0, 4, 0), Window(3, 7, 4), Window(6, 10, 7)]
    assert list(windows(3, length=4, stride=4)) == [Window(0, 3, 0)]


def test_a_stride_beyond_the_window_would_skip_tokens() -> None:
    with pytest.raises(ValueError, match="stride of 5"):
        list(windows(10, length=4, stride=5))


def test_windows_are_those_of_megatron_lm_that_score_something() -> None:
    """Its rule: window i covers tokens i·o to i·o + L and all but the first count their last o targets; the number of
    windows is max(ceil(max(targets - o, 0) / o) + 1, 1), of which the last ones hold nothing that counts.
    """
    for targets, length in itertools.product(range(1, 60), range(1, 12)):
        for stride in range(1, length + 1):
            count = max(math.ceil(max(targets - stride, 0) / stride) + 1, 1)
            theirs = []
            for number in range(count):
                start = number * stride
                first = start if number == 0 else start + length - stride
                if first < min(start + length, targets):
                    theirs.append(Window(start, min(start + length, targets), first))
            assert list(windows(targets, length=length, stride=stride)) == theirs


def test_samples_hold_each_token_but_the_first_once_as_a_target() -> None:
    for sample, scored in zip(samples_of([9, 1, 2, 3, 4, 5, 6], length=4, stride=2), ([1, 2, 3, 4], [5, 6])):
        assert sample.tokens[1:][sample.first_scored :].tolist() == scored
        assert sample.num_scored == len(scored)
    assert list(samples_of([9], length=4, stride=2)) == []


def test_figures_by_hand() -> None:
    score = TextScore(nats=10 * math.log(2), tokens=5)
    assert score.loss == pytest.approx(2 * math.log(2))
    assert perplexity(score.loss) == pytest.approx(4.0)
    assert score.bits_per_byte(20) == pytest.approx(0.5)
