"""How evenly experts are used: numbers by hand, and the line that users read."""

from __future__ import annotations

import math

import pytest

from megatron.core.moe.report import Balance, balance_curves, balance_line, log_line_and_curves
from tests.harness.sentences import check_sentence

EVEN, UNEVEN = Balance.of([5, 5, 5, 5, 0], ranks=2), Balance.of([12, 4, 0, 4, 2], ranks=2)


def test_balance() -> None:
    """A wrong mean or rank hides the expert that slows every step."""
    even = {"max_violation": 0.0, "entropy": 1.0, "dead": 0, "dropped": 0.0, "busiest_rank": 1.0}
    assert vars(EVEN) == pytest.approx(even)
    shares = (0.6, 0.2, 0.2)
    entropy = -sum(share * math.log(share) for share in shares) / math.log(4)
    uneven = {"max_violation": 12 / 5 - 1, "entropy": entropy, "dead": 1, "dropped": 0.1, "busiest_rank": 1.6}
    assert vars(UNEVEN) == pytest.approx(uneven)
    assert Balance.of([0, 0, 0], ranks=1).dead == 2
    assert Balance.of([7, 0], ranks=1).entropy == 1.0


def test_line_and_curves() -> None:
    """The worst layer is named; each layer has curves where they are asked for."""
    layers = {"layer 0": EVEN, "layer 3": UNEVEN}
    assert balance_line(layers) == (
        " experts | max violation: 1.40 (layer 3) | mean violation: 0.70 | entropy: 0.843 | dead experts: 1 | "
        "busiest rank: 1.60 x mean | dropped: 5.0% |"
    )
    assert "moe/max_violation_layer_3" not in balance_curves(layers, per_layer=False)
    curves = balance_curves(layers, per_layer=True)
    assert curves["moe/max_violation_layer_3"] == curves["moe/max_violation"] == pytest.approx(1.4)
    assert curves["moe/dropped_share"] == 0.05
    assert curves["moe/busiest_rank_layer_3"] == curves["moe/busiest_rank"] == pytest.approx(1.6)


def test_losses_of_layers_are_means_over_their_tokens() -> None:
    """They had no curves: ``--moe-per-layer-logging`` wrote how evenly experts are used alone."""
    layer_metrics: dict[str, list[float]] = {
        "experts of layer 1": [3, 1, 0],
        "z_loss of layer 1": [6.0, 4.0],
        "z_loss of layer 12": [0.0, 0.0],
    }
    line, curves = log_line_and_curves(layer_metrics, ranks=1, per_layer=True)
    check_sentence(line, "0.50", "layer 1")
    assert "z_loss" not in line
    assert (curves["moe/z_loss_layer_1"], curves["moe/z_loss_layer_12"]) == (1.5, 0.0)
    assert curves["moe/max_violation_layer_1"] == 0.5
