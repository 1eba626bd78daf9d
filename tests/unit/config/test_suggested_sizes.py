"""Sizes that messages suggest, and lists of messages."""

from __future__ import annotations

from megatron.config.rules import listed
from megatron.config.rules.sizes import divisors, divisors_near, multiples_near, some


def test_listed() -> None:
    """One failure is a sentence, several are a numbered list."""
    assert listed(["a"]) == "a"
    assert listed(["a", "b"]) == "2 problems in the settings:\n  1. a\n  2. b"


def test_divisors() -> None:
    """Suggested sizes divide."""
    for number in range(1, 200):
        assert divisors(number) == [each for each in range(1, number + 1) if number % each == 0]


def test_suggestions() -> None:
    """Suggestions are near what was asked."""
    assert some(divisors(64), near=16, most=3) == "4, 8 or 16"
    assert divisors_near(100, 12) == "10 or 20"
    assert divisors_near(7, 7) == "1"
    assert multiples_near(100, 8) == "96 or 104"
    assert multiples_near(3, 8) == "8"
