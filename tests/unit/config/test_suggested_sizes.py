"""Sizes that messages suggest, and lists of messages."""

from __future__ import annotations

import dataclasses

from megatron.config import ParallelConfig
from megatron.config.rules import listed
from megatron.config.rules.sizes import divisors, divisors_near, multiples_near, some, tensor_parallel_sizes
from megatron.errors import ConfigError
from tests.unit.config.command_lines import parse, run_of

SPLIT = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)


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


def test_suggested_tensor_parallel_sizes_pass_the_rules() -> None:
    """What a message says would fit does fit."""
    for ranks in (1, 2, 4, 6, 8, 12):
        # Tensor parallelism asked for, so that sequence parallelism counts; whether it fits is not asked here.
        base = dataclasses.replace(run_of(ranks=ranks, length=12), parallel=SPLIT)
        sizes = tensor_parallel_sizes(base)
        for size in range(2, 13):
            sound = size in sizes
            changes = f"--tensor-model-parallel-size {size} --sequence-parallel --seq-length 12"
            assert sound == (not _refused(changes, ranks)), (ranks, size)


def _refused(changes: str, ranks: int) -> bool:
    try:
        parse(changes, ranks=ranks)
    except ConfigError:
        return True
    return False
