"""What the generation benchmark compares writes the same texts: else its ratios would say nothing."""

from __future__ import annotations

import pytest
import torch

from benchmarks.generation import BLOCK, Shape, build, hand_loop, ours, prompts_of, runner_of, transformers

pytest.importorskip("transformers", reason="the peers are the dev extra's")

SMALL = Shape(layers=2, hidden=32, heads=4, vocabulary=256, length=128)


def test_contenders_write_the_same() -> None:
    """Greedily in fp64, prompts of one length and of many."""
    model = build(SMALL, torch.float64)
    contenders = {
        "transformers, dynamic": transformers(model, SMALL, cache="dynamic"),
        "transformers, static": transformers(model, SMALL, cache="static"),
        "by hand": hand_loop(model, SMALL),
    }
    for unequal in (False, True):
        prompts = prompts_of(3, SMALL, unequal=unequal, length=8)
        expected = ours(model, SMALL, requests=3)(prompts, 6)
        for name, contender in contenders.items():
            assert contender(prompts, 6) == expected, name


def test_the_cache_takes_what_its_formula_says() -> None:
    """Tokens x layers x (width of keys and of values) x size of a number, as users plan with it."""
    runner = runner_of(build(SMALL, torch.bfloat16), SMALL, requests=3)
    assert runner.cache_bytes == (1 + 3 * 2) * BLOCK * SMALL.layers * 2 * SMALL.hidden * 2
