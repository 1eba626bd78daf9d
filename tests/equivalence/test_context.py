"""Rows of the table where slices of the sequence meet pipeline stages, and shared key/value heads meet everything."""

from __future__ import annotations

import pytest

from tests.equivalence.flags import (
    CP2,
    CP4,
    FULL,
    LOOPED,
    PP2,
    SELECTIVE,
    SP,
    TP2,
    TP4,
    VEE,
    ZB_H1,
    ZERO,
    ZERO_OVERLAPPED,
)
from tests.equivalence.test_equivalence import FEW_GROUPS, check
from tests.equivalence.test_pipeline import deep
from tests.equivalence.training import train_alone, train_at
from tests.tiers import pairs, tiers

SLICED_STAGES: dict[str, str] = {
    "pp2 cp2 heads": f"--world-size 4 {CP2} --cp-comm-type a2a {PP2} --micro-batch-size 4",
    "pp2 cp2 tp2 gather, recompute selective": (
        f"--world-size 8 {TP2} {CP2} --cp-comm-type all_gather {PP2} --micro-batch-size 4 {SELECTIVE} "
        "--recompute-modules core_attn layernorm"
    ),
    "pp2 cp4 heads and rings": (
        f"--world-size 8 {CP4} --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2 {PP2} "
        "--micro-batch-size 4"
    ),
    "pp2 vpp2 cp2, another way in each layer": (
        f"--world-size 4 {CP2} --cp-comm-type p2p a2a all_gather p2p a2a all_gather {LOOPED}"
    ),
    "pp2 zb-h1 cp2, recompute full": f"--world-size 4 {CP2} {PP2} {ZB_H1} {FULL}",
    "pp2 zb-v cp2 dp2 zero overlapped": f"--world-size 8 {CP2} {VEE} {ZERO_OVERLAPPED} --ddp-bucket-size 1000",
    "cp2 dp2 outside pp2": f"--world-size 8 {CP2} {PP2} --use-tp-pp-dp-mapping",
}
SHARED_HEADS: dict[str, str] = {
    "pp2 tp4 sp": f"--world-size 8 {TP4} {SP} {PP2} --micro-batch-size 4",
    "pp2 zb-v tp4": f"--world-size 8 {TP4} {VEE}",
    "pp2 vpp2 tp4 zero": f"--world-size 8 {TP4} {LOOPED} {ZERO} --micro-batch-size 4",
}


@pytest.mark.parametrize(
    ("variant", "layout"),
    pairs(
        ["gpt2 tied", "llama tied, qk norm, documents", "bert"],
        SLICED_STAGES,
        rich=("pp2 cp2 heads", "pp2 zb-h1 cp2, recompute full", "pp2 vpp2 cp2, another way in each layer"),
        # Rings between heads, and replicas outside stages, are in the default tier without the other.
        slow=(
            "pp2 cp4 heads and rings",
            "cp2 dp2 outside pp2",
            "pp2 zb-v cp2 dp2 zero overlapped",
            "pp2 cp2 tp2 gather, recompute selective",
        ),
    ),
)
def test_stages_of_slices_compute_the_model_of_one_rank(variant: str, layout: str) -> None:
    """Keys that travel between stages' messages could meet the wrong microbatch."""
    check(train_at(deep(variant, layers=6), SLICED_STAGES[layout]), [train_alone(deep(variant, layers=6))])


# Shared heads without stages are in the default tier at as many ranks; split backward passes are where they could fail.
@pytest.mark.parametrize("layout", tiers(SHARED_HEADS, first=("pp2 zb-v tp4",)))
def test_stages_with_shared_heads_compute_the_model_of_one_rank(layout: str) -> None:
    """Split backward passes accumulate weight gradients on their own; shared rows must be in them."""
    row = f"{FEW_GROUPS['two groups, qk norm, documents']} --num-layers 5"
    check(train_at(row, SHARED_HEADS[layout]), [train_alone(row)])
