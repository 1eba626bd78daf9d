"""Layers over stages."""

from __future__ import annotations

import pytest

from megatron.config.pipeline import balanced_sizes, stages_of


@pytest.mark.parametrize("num_layers", range(1, 40))
@pytest.mark.parametrize("num_stages", range(1, 9))
def test_no_layer_is_lost_or_doubled(num_layers: int, num_stages: int) -> None:
    """A lost layer trains a smaller model than asked for, without a word."""
    stages = stages_of(balanced_sizes(num_layers, num_stages))
    assert [layer for stage in stages for layer in stage.layers] == list(range(num_layers))
    sizes = [len(stage.layers) for stage in stages]
    assert max(sizes) - min(sizes) <= 1
    assert [stage.is_first for stage in stages] == [number == 0 for number in range(num_stages)]
    assert [stage.is_last for stage in stages] == [number == num_stages - 1 for number in range(num_stages)]


def test_the_ends_carry_less() -> None:
    """Embedding and loss are work of the first and last stage, so the surplus layers go between."""
    assert balanced_sizes(6, 4) == [1, 2, 2, 1]
