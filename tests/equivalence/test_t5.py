"""T5's rows of the table: two stacks of layers in one chain, wherever it is cut, at every way of dividing the work.

The encoder has two layers and the decoder three, so of two equal stages one has the border inside.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from megatron.core.parallel.context import ParallelContext
from megatron.core.transformer.block import RecomputePlan
from megatron.training.evaluation.parity import Observed
from tests.equivalence.test_context import SLICED_STAGES
from tests.equivalence.test_equivalence import GATHER, LAYOUTS, LLAMA, SMALL, STILL, check, train_at
from tests.equivalence.test_pipeline import COMBINED, EIGHT_RANKS, OVERLAPPED, STAGES, VEE
from tests.equivalence.training import Layout, train
from tests.tiers import pairs, tiers

T5: dict[str, Any] = SMALL | {
    "family": "t5",
    "position_embedding_type": "relative",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "softmax_scale": 1.0,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "original": T5 | STILL | {"activation": "relu"},
    "v1.1": T5 | STILL | {"activation": "geglu_tanh", "untie_embeddings_and_output_weights": True},
    "megatron": SMALL | STILL | {"family": "t5"},
}
OTHERS: dict[str, dict[str, Any]] = {
    "untied, residuals behind norms": SMALL
    | STILL
    | {
        "family": "t5",
        "apply_residual_connection_post_layernorm": True,
        "untie_embeddings_and_output_weights": True,
    },
    "rotary, few groups, qk norm": LLAMA
    | STILL
    | {"family": "t5", "num_query_groups": 2, "qk_layernorm": True, "untie_embeddings_and_output_weights": False},
    "relative with dropout": T5 | {"activation": "relu", "attention_dropout": 0.2, "hidden_dropout": 0.2},
    "megatron with dropout": SMALL | {"family": "t5", "attention_dropout": 0.2, "hidden_dropout": 0.2},
}
FULL, SELECTIVE = RecomputePlan("full"), RecomputePlan("selective", modules=("core_attn", "layernorm"))

"""Heads can't be exchanged under relative positions, and four context-parallel ranks of two slices are too many for the
decoder's length."""
RELATIVE = [name for name in LAYOUTS if "heads" not in name and "another way" not in name and "cp4" not in name]
RELATIVE = [name for name in RELATIVE if LAYOUTS[name].cp == 1 or LAYOUTS[name].cp_comm_types in (("p2p",), GATHER)]
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
    "pp2 cp2",
    "pp2 vpp2 dp2 overlapped, recompute full",
    "pp2 zb-h1 dp2 zero overlapped",
    "pp2 zb-v tp2, recompute selective",
)
"""Each way of dividing work once; a GPT is at every layout in the default tier."""
EXCHANGING = ["cp4 heads", "cp4 heads and rings", "cp2 tp2 heads", "cp2 heads, recompute selective"]
CUTS: dict[str, Layout] = {
    "pp2, border inside the first": Layout(pp=2, stage_sizes=(4, 1)),
    "pp2, border inside the second": Layout(pp=2, stage_sizes=(1, 4)),
    "pp2, border between": Layout(pp=2, stage_sizes=(2, 3)),
    "pp3 zb-h1, only ends in the ends": Layout(pp=3, schedule="zb-h1", stage_sizes=(0, 5, 0)),
    "pp2 zb-v, both embeddings and the output on a rank": Layout(**VEE, stage_sizes=(2, 1, 1, 1)),
    "pp2 zb-v tp2 sp, relative positions of one stack on both": Layout(
        **VEE, tp=2, sequence_parallel=True, stage_sizes=(1, 1, 2, 1)
    ),
    "pp2 vpp2 dp2 zero overlapped": Layout(
        pp=2, chunks=2, schedule="interleaved", dp=2, sharded=True, stage_sizes=(1, 2, 1, 1), **OVERLAPPED
    ),
    "pp2 cp2 gather": Layout(pp=2, cp=2, cp_comm_types=GATHER, recompute=FULL),
}
EVERYTHING = LAYOUTS | STAGES | COMBINED | EIGHT_RANKS | SLICED_STAGES | CUTS


@functools.cache
def reference(variant: str) -> list[Observed]:
    """Three steps on one rank."""
    return [train(ParallelContext.single(dtype=torch.float64), (VARIANTS | OTHERS)[variant], Layout())]


def check_at(variant: str, layout: Layout) -> None:
    """The variant computes at the layout what it computes on one rank."""
    check(train_at((VARIANTS | OTHERS)[variant], layout), reference(variant))


@pytest.mark.parametrize("layout", tiers(RELATIVE, first=CORE))
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
        ["megatron", "untied, residuals behind norms", "rotary, few groups, qk norm"],
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
    ),
)
def test_dropout_is_a_function_of_sample_and_layer(variant: str, layout: str) -> None:
    """Recomputation, replicas or stages would draw other masks than one rank's forward pass."""
    check_at(variant, EVERYTHING[layout])
