"""Patterns of layers: which are marked, and what is no pattern."""

from __future__ import annotations

import pytest

from megatron.config.layer_patterns import marked_layers, pattern_of
from megatron.errors import ConfigError
from tests.harness.sentences import expect_error


def marks(pattern: str, layers: int) -> str:
    return "".join(str(int(each)) for each in marked_layers(pattern, layers, flag="--x"))


def test_numbers_and_lists() -> None:
    """A layer too early or too late would see another part of the text than in the published model."""
    assert marks("3", 7) == "0010010"
    assert marks("1", 3) == "111"
    assert marks("9", 3) == "000"
    assert marks("[1]*3+[0]", 8) == "11101110"
    assert marks("([1]*2 + [0,1])*2", 8) == "11011101"
    assert marks("[0, 1, 1]", 3) == "011"


@pytest.mark.parametrize(
    "pattern", ["", "0", "-1", "1.5", "[]", "[2]", "[1]*0", "2*[1]", "[[1]]", "[1]*10**9", "[1]*99999", "f()", "True"]
)
def test_what_is_no_pattern(pattern: str) -> None:
    """It is never evaluated as Python."""
    with expect_error(ConfigError):
        marked_layers(pattern, 4, flag="--x")


def test_lists_fit_the_stack() -> None:
    """A list of another length would end in the middle."""
    with expect_error(ConfigError, "--x", "'[1,0,1]'", "3"):
        marked_layers("[1,0,1]", 4, flag="--x")


def test_there_and_back() -> None:
    """Every choice of up to six layers comes back from its pattern."""
    for count in range(1, 7):
        for bits in range(2**count):
            marked = tuple(bool(bits >> number & 1) for number in range(count))
            pattern = pattern_of(marked)
            assert (pattern and marked_layers(pattern, count, flag="--x")) == (marked if any(marked) else None)
