"""Hybrids of attention, MLP and expert layers, each alone in its layer, at every kind of layout against one rank."""

from __future__ import annotations

import pytest

from megatron.training.evaluation.parity import Observed
from tests.equivalence.flags import CP2, EP2, ETP1, FULL, HYBRID, LOOPED, PP2, SP, TP2, VEE, ZERO_OVERLAPPED
from tests.equivalence.test_equivalence import check
from tests.equivalence.training import train_alone, train_at
from tests.tiers import tiers

MODEL = f"gpt: {HYBRID} --mtp-loss-scaling-factor 0.7"
PATTERN, DEPTHS = "*-E*E-*", "/*E/*E"

LAYOUTS: dict[str, tuple[str, str]] = {
    "tp2 sp ep2 recompute": (PATTERN, f"--world-size 2 {TP2} {SP} {EP2} {ETP1} {FULL}"),
    "pp2, cut at a border, cp2": ("*|-E*E-*", f"--world-size 4 {PP2} {CP2} --micro-batch-size 1"),
    "pp2 interleaved, cut at borders": ("*-|E*E|-|*", f"--world-size 2 {PP2} --micro-batch-size 1"),
    "pp2 interleaved, cut by cost": (PATTERN, f"--world-size 2 {LOOPED} --micro-batch-size 1"),
    "tp2 pp2 dp2 zero, zb-v": (
        PATTERN,
        f"--world-size 8 {TP2} {VEE} {ZERO_OVERLAPPED} {EP2} {ETP1} --ddp-bucket-size 3000 --micro-batch-size 1 {FULL}",
    ),
}


def reference() -> Observed:
    """Three steps on one rank."""
    return train_alone(f"{MODEL} --hybrid-layer-pattern {PATTERN}{DEPTHS}")


FIRST = ["tp2 sp ep2 recompute", "pp2 interleaved, cut at borders"]


@pytest.mark.parametrize("layout", tiers(LAYOUTS, first=FIRST))
def test_hybrids(layout: str) -> None:
    """A layer of the wrong kind on another rank, or a stage cut elsewhere, trains another model."""
    pattern, flags = LAYOUTS[layout]
    check(train_at(f"{MODEL} --hybrid-layer-pattern {pattern}{DEPTHS}", flags), [reference()])


def test_each_letter_is_one_layer() -> None:
    """A layer of a hybrid has one mixer and its norm, also in multi-token prediction."""
    shapes = reference().shapes
    kinds = {"*": "self_attention.linear_qkv", "-": "mlp.linear_fc1", "E": "mlp.experts.linear_fc1"}
    norms = {"*": "input_layernorm", "-": "pre_mlp_layernorm", "E": "pre_mlp_layernorm"}
    for number, letter in enumerate(PATTERN):
        names = {name for name in shapes if name.startswith(f"decoder.layers.{number}.")}
        assert f"decoder.layers.{number}.{kinds[letter]}.weight" in names
        assert {name for name in names if "norm" in name} == {f"decoder.layers.{number}.{norms[letter]}.weight"}
    for depth in range(2):
        assert f"mtp.layers.{depth}.layers.0.self_attention.linear_qkv.weight" in shapes
        assert f"mtp.layers.{depth}.layers.1.mlp.experts.linear_fc1.weight" in shapes
