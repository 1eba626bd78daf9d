"""T5's rows of the table: two stacks of layers in one chain, wherever it is cut, at every way of dividing the work.

The encoder has two layers and the decoder three, so of two equal stages one has the border inside.
"""

from __future__ import annotations

import pytest

from tests.equivalence.flags import (
    CP2,
    FULL,
    LLAMA_TIED,
    PP2,
    PP3,
    RELATIVE,
    SMALL,
    SP,
    TP2,
    VEE,
    ZB_H1,
    ZERO_OVERLAPPED,
)
from tests.equivalence.test_context import SLICED_STAGES
from tests.equivalence.test_equivalence import LAYOUTS, check
from tests.equivalence.test_pipeline import COMBINED, EIGHT_RANKS, STAGES
from tests.equivalence.training import train_alone, train_at
from tests.tiers import pairs, tiers

VARIANTS: dict[str, str] = {
    "original": f"t5: {RELATIVE} --scale-output --activation relu",
    "v1.1": f"t5: {RELATIVE} --activation geglu_tanh --untie-embeddings-and-output-weights",
    "megatron": f"t5: {SMALL}",
}
OTHERS: dict[str, str] = {
    "untied, residuals behind norms": (
        f"t5: {SMALL} --apply-residual-connection-post-layernorm --untie-embeddings-and-output-weights"
    ),
    "rotary, few groups, qk norm": f"t5: {LLAMA_TIED} --num-query-groups 2 --qk-layernorm",
    "rotary, few groups, qk norm, muP, z-loss": (
        f"t5: {LLAMA_TIED} --num-query-groups 2 --qk-layernorm --use-mup --mup-base-hidden-size 8 --z-loss-coeff 0.3"
    ),
    "relative with dropout": (
        f"t5: {RELATIVE} --scale-output --activation relu --attention-dropout 0.2 --hidden-dropout 0.2"
    ),
    "megatron with dropout": f"t5: {SMALL} --attention-dropout 0.2 --hidden-dropout 0.2",
}
"""Heads can't be exchanged under relative positions, and four context-parallel ranks of two slices are too many for the
decoder's length."""
RELATIVE_LAYOUTS = [name for name in LAYOUTS if "heads" not in name and "another way" not in name and "cp4" not in name]
CORE = (
    "one rank, recompute full",
    "tp4",
    "dp4, fully masked rank",
    "tp2 sp dp2 zero recompute",
    "cp2 gather",
    "cp2 recompute selective",
)
CORE_STAGES = ("pp3, fully masked microbatch", "pp2 zb-v")
CORE_COMBINED = (
    "pp2 tp2 sp",
    "dp2 outside pp2, overlapped",
    "pp2 zb-h1 dp2 zero overlapped",
)
"""Each way of dividing work once, here or in other tests below; a GPT is at every layout in the default tier."""
EXCHANGING = ["cp4 heads", "cp4 heads and rings", "cp2 tp2 heads", "cp2 heads, recompute selective"]
CUTS: dict[str, str] = {
    "pp2, border inside the first": f"--world-size 2 {PP2} --pipeline-model-parallel-layout Etttt|tL",
    "pp2, border inside the second": f"--world-size 2 {PP2} --pipeline-model-parallel-layout Et|ttttL",
    "pp2, border between": f"--world-size 2 {PP2} --pipeline-model-parallel-layout Ett|tttL",
    "pp3 zb-h1, only ends in the ends": f"--world-size 3 {PP3} {ZB_H1} --pipeline-model-parallel-layout E|ttttt|L",
    "pp2 zb-v, both embeddings and the output on a rank": (
        f"--world-size 2 {VEE} --pipeline-model-parallel-layout Ett|t|t|tL"
    ),
    "pp2 zb-v tp2 sp, relative positions of one stack on both": (
        f"--world-size 4 {TP2} {SP} {VEE} --pipeline-model-parallel-layout Et|t|tt|tL"
    ),
    "pp2 vpp2 dp2 zero overlapped": (
        f"--world-size 4 {PP2} --pipeline-model-parallel-layout Et|tt|t|tL {ZERO_OVERLAPPED} --ddp-bucket-size 1000"
    ),
    "pp2 cp2 gather": f"--world-size 4 {CP2} --cp-comm-type all_gather {PP2} {FULL}",
}
EVERYTHING = LAYOUTS | STAGES | COMBINED | EIGHT_RANKS | SLICED_STAGES | CUTS


def check_at(variant: str, layout: str) -> None:
    """The variant computes at the layout what it computes on one rank."""
    row = (VARIANTS | OTHERS)[variant]
    check(train_at(row, layout), [train_alone(row)])


@pytest.mark.parametrize("layout", tiers(RELATIVE_LAYOUTS, first=CORE))
def test_layout_computes_the_t5_of_one_rank(layout: str) -> None:
    """A wrong or missing collective around cross-attention or the tables of positions would train another model."""
    check_at("original", LAYOUTS[layout])


@pytest.mark.parametrize("layout", tiers(STAGES, first=CORE_STAGES))
def test_stages_compute_the_t5_of_one_rank(layout: str) -> None:
    """Gradients of what the encoder made come from every stage of the decoder, those of tables from every holder."""
    check_at("original", STAGES[layout])


@pytest.mark.parametrize(
    ("variant", "layout"),
    pairs(
        VARIANTS,
        CUTS,
        rich=("pp2 vpp2 dp2 zero overlapped", "pp2 zb-v tp2 sp, relative positions of one stack on both"),
        slow=(
            "pp2, border inside the first",
            "pp2, border between",
            "pp2 zb-v, both embeddings and the output on a rank",
        ),
    ),
)
def test_stages_may_be_cut_anywhere(variant: str, layout: str) -> None:
    """Tied and untied matrices and tables, on any set of stages."""
    check_at(variant, CUTS[layout])


@pytest.mark.parametrize("layout", tiers(COMBINED | EIGHT_RANKS, first=CORE_COMBINED))
def test_stages_combine_with_other_ways(layout: str) -> None:
    """Each way of dividing work may be right alone and wrong together."""
    check_at("original", (COMBINED | EIGHT_RANKS)[layout])


@pytest.mark.parametrize(
    "layout",
    tiers(
        ["pp2 zb-v tp2, recompute selective", "tp4 sp", "cp2 tp2 sp dp2 zero recompute"],
        first=("pp2 zb-v tp2, recompute selective",),
    ),
)
def test_untied_output(layout: str) -> None:
    """Both embeddings stay one when the output isn't."""
    check_at("v1.1", EVERYTHING[layout])


@pytest.mark.parametrize(
    ("variant", "layout"),
    pairs(
        [
            "megatron",
            "untied, residuals behind norms",
            "rotary, few groups, qk norm",
            "rotary, few groups, qk norm, muP, z-loss",
        ],
        ["tp4 sp", "cp2 tp2 sp dp2 zero recompute", "pp2 zb-v", *EXCHANGING],
        rich=("pp2 zb-v", "cp4 heads", "cp2 tp2 heads"),
        slow=("tp4 sp", "cp2 tp2 sp dp2 zero recompute", "cp4 heads and rings"),
    ),
)
def test_other_positions_and_arrangements(variant: str, layout: str) -> None:
    """Positions that enter elsewhere, heads that ranks exchange or share, biases and norms of other kinds."""
    check_at(variant, EVERYTHING[layout])


@pytest.mark.parametrize(
    ("variant", "layout"),
    pairs(
        ["relative with dropout", "megatron with dropout"],
        ["one rank, recompute full", "one rank, recompute selective", "dp2 zero", "pp2 zb-v"],
        rich=("pp2 zb-v",),
        # GPT's are, in test_equivalence.py.
        slow=("megatron with dropout", "one rank, recompute selective", "dp2 zero"),
    ),
)
def test_dropout_is_a_function_of_sample_and_layer(variant: str, layout: str) -> None:
    """Recomputation, replicas or stages would draw other masks than one rank's forward pass."""
    check_at(variant, EVERYTHING[layout])
