"""Update rules compute on any layout what they compute on one rank, in fp64."""

from __future__ import annotations

import pytest

from tests.equivalence.flags import (
    CP2,
    EP2,
    ETP1,
    EXPERTS,
    FULL,
    LATENT,
    LLAMA,
    PP2,
    SP,
    TP2,
    TP4,
    ZB_H1,
    ZERO,
    ZERO_2,
    ZERO_3,
    ZERO_OVERLAPPED,
)
from tests.equivalence.test_equivalence import check
from tests.equivalence.training import train_alone, train_at
from tests.tiers import pairs

GROUPS = f"{LLAMA} --num-query-groups 2 --attention-output-gate"
RULES: dict[str, str] = {
    "muon": f"{GROUPS} --optimizer muon --muon-nesterov --muon-scalar-optimizer lion",
    "muon, experts": (
        f"{LLAMA} {EXPERTS} --optimizer muon --muon-coefficient-type simple --muon-extra-scale-factor 0.2 "
        "--muon-scale-mode unit_rms_norm --lr-multipliers *.router.*=0.5"
    ),
    "muon, latents, stacked matrices as one": (
        f"{LATENT} --optimizer muon --muon-no-split-gate-up --muon-scale-mode shape_scaling"
    ),
    "muon, frozen layer, queries, keys and values as one": (
        f"{GROUPS} --optimizer muon --muon-no-split-qkv --freeze decoder.layers.1.*"
    ),
    "lion": f"{LLAMA} --optimizer lion",
    "ademamix": f"{LLAMA} --optimizer ademamix --ademamix-warmup-iters 5",
    "adafactor": f"{GROUPS} --optimizer adafactor --adafactor-scale-parameter",
    "soap": f"{GROUPS} --optimizer soap --adam-eps 1e-6 --soap-precondition-frequency 2",
}
LAYOUTS: dict[str, str] = {
    "one rank, recompute full": f"{FULL}",
    "tp2 sp": f"--world-size 2 {TP2} {SP} --micro-batch-size 4",
    "dp2": "--world-size 2",
    "dp2 zero": f"--world-size 2 {ZERO}",
    "dp2 zero 2": f"--world-size 2 {ZERO_2} --micro-batch-size 2",
    "tp2 dp2 zero 3": f"--world-size 4 {TP2} {ZERO_3} --overlap-grad-reduce --overlap-param-gather",
    "cp2 zero": f"--world-size 2 {CP2} {ZERO}",
    "pp2": f"--world-size 2 {PP2} --micro-batch-size 4",
    "tp4 dp2 zero, small buckets": f"--world-size 8 {TP4} {SP} {ZERO} --ddp-bucket-size 1000",
    "tp2 sp pp2 dp2 zero overlapped, experts divided": (
        f"--world-size 8 {TP2} {SP} {PP2} {ZB_H1} {ZERO_OVERLAPPED} {EP2} {ETP1} --ddp-bucket-size 3000 "
        "--micro-batch-size 1"
    ),
    "tp2 cp2 dp2 zero, experts divided": f"--world-size 8 {TP2} {CP2} {ZERO} {EP2} --micro-batch-size 2",
}
RICH = (
    "tp4 dp2 zero, small buckets",
    "tp2 sp pp2 dp2 zero overlapped, experts divided",
    "dp2 zero",
)


@pytest.mark.parametrize(("rule", "layout"), pairs(RULES, LAYOUTS, rich=RICH))
def test_an_update_is_that_of_whole_matrices_at_every_layout(rule: str, layout: str) -> None:
    """A rule that saw a rank's part of a matrix, a shared row twice, or stacked matrices as one, would be another
    optimizer at each layout.
    """
    check(train_at(RULES[rule], LAYOUTS[layout]), [train_alone(RULES[rule])])
