"""Rows of the table where slices of the sequence meet pipeline stages, and shared key/value heads meet everything."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.core.transformer.block import RecomputePlan
from tests.equivalence.test_equivalence import FEW_GROUPS, GATHER, HALVES, HEADS, LEVELS, check, train_at
from tests.equivalence.test_pipeline import LOOPED, OVERLAPPED, VEE, reference, settings
from tests.equivalence.training import Layout
from tests.tiers import pairs, tiers

FULL, SELECTIVE = RecomputePlan("full"), RecomputePlan("selective", modules=("core_attn", "layernorm"))

SLICED_STAGES: dict[str, Layout] = {
    "pp2 cp2 heads": Layout(pp=2, cp=2, cp_comm_types=HEADS, **HALVES),
    "pp2 cp2 tp2 gather, recompute selective": Layout(
        pp=2, cp=2, tp=2, cp_comm_types=GATHER, recompute=SELECTIVE, **HALVES
    ),
    "pp2 cp4 heads and rings": Layout(pp=2, cp=4, **LEVELS, **HALVES),
    "pp2 vpp2 cp2, another way in each layer": Layout(**LOOPED, cp=2, cp_comm_types=("p2p", "a2a", "all_gather") * 2),
    "pp2 zb-h1 cp2, recompute full": Layout(pp=2, schedule="zb-h1", cp=2, recompute=FULL),
    "pp2 zb-v cp2 dp2 zero overlapped": Layout(**VEE, cp=2, dp=2, sharded=True, **OVERLAPPED),
    "cp2 dp2 outside pp2": Layout(pp=2, cp=2, dp=2, pp_before_dp=False),
}
SHARED_HEADS: dict[str, Layout] = {
    "pp2 tp4 sp": Layout(pp=2, tp=4, sequence_parallel=True, **HALVES),
    "pp2 zb-v tp4": Layout(**VEE, tp=4),
    "pp2 vpp2 tp4 zero": Layout(**LOOPED, tp=4, sharded=True, **HALVES),
}


@pytest.mark.parametrize(
    ("variant", "layout"),
    pairs(
        ["gpt2 tied", "llama tied, qk norm, documents", "bert"],
        SLICED_STAGES,
        rich=("pp2 cp2 heads", "pp2 cp2 tp2 gather, recompute selective", "pp2 vpp2 cp2, another way in each layer"),
        # Rings between heads, and replicas outside stages, are in the default tier without the other.
        slow=("pp2 cp4 heads and rings", "cp2 dp2 outside pp2"),
    ),
)
def test_stages_of_slices_compute_the_model_of_one_rank(variant: str, layout: str) -> None:
    """Keys that travel between stages' messages could meet the wrong microbatch."""
    check(train_at(settings(variant, layers=6), SLICED_STAGES[layout]), reference(variant, layers=6))


# Shared heads without stages are in the default tier at as many ranks; split backward passes are where they could fail.
@pytest.mark.parametrize("layout", tiers(SHARED_HEADS, first=("pp2 zb-v tp4",)))
def test_stages_with_shared_heads_compute_the_model_of_one_rank(layout: str) -> None:
    """Split backward passes accumulate weight gradients on their own; shared rows must be in them."""
    model: dict[str, Any] = FEW_GROUPS["two groups, qk norm, documents"] | {"num_layers": 5}
    check(train_at(model, SHARED_HEADS[layout]), train_at(model, Layout()))
