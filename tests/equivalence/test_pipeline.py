"""The rows of the table with pipeline stages: every schedule, with every other way of dividing the work.

Models are deeper than in the other rows, and their layers don't divide evenly over the stages.
"""

from __future__ import annotations

import pytest

from tests.equivalence.flags import (
    CP2,
    FULL,
    LOOPED,
    NO_OVERLAP,
    OFFLOADED,
    PP2,
    PP3,
    PP4,
    SELECTIVE,
    SP,
    TP2,
    TP4,
    VEE,
    ZB_H1,
    ZERO_OVERLAPPED,
)
from tests.equivalence.test_equivalence import DRAWING, VARIANTS, check, draws_the_same
from tests.equivalence.training import train_alone, train_at
from tests.tiers import pairs

LATER = (
    "future tokens, documents",
    "future tokens, documents, z-loss",
    "future tokens, tied, norms after, latent attention",
)
LATENT = "latent attention, yarn with a factor of scores, documents"
BERT = ("bert", "bert, residuals behind norms")

STAGES: dict[str, str] = {
    "pp2 gpipe": f"--world-size 2 {PP2} --pipeline-schedule gpipe",
    "pp2, transfers not overlapped": f"--world-size 2 {PP2} {NO_OVERLAP}",
    "pp2, one microbatch": f"--world-size 2 {PP2} --micro-batch-size 8",
    "pp3, fully masked microbatch": f"--world-size 3 {PP3} --micro-batch-size 1",
    "pp4": f"--world-size 4 {PP4}",
    "pp2 vpp2": f"--world-size 2 {LOOPED}",
    "pp2 zb-h1": f"--world-size 2 {PP2} {ZB_H1}",
    "pp4 zb-h1": f"--world-size 4 {PP4} {ZB_H1} --micro-batch-size 1",
    "pp2 zb-v": f"--world-size 2 {VEE}",
    "pp2 zb-v, transfers not overlapped": f"--world-size 2 {VEE} {NO_OVERLAP}",
}
COMBINED: dict[str, str] = {
    "pp2 tp2 sp": f"--world-size 4 {TP2} {SP} {PP2} --micro-batch-size 4",
    "pp2 tp2 gpipe recompute selective": (
        f"--world-size 4 {TP2} {PP2} --pipeline-schedule gpipe --micro-batch-size 4 {SELECTIVE} "
        "--recompute-modules core_attn layernorm"
    ),
    "pp2 dp2 zero overlapped": f"--world-size 4 {PP2} {ZERO_OVERLAPPED} --ddp-bucket-size 3000",
    "dp2 outside pp2, overlapped": (
        f"--world-size 4 {PP2} --use-tp-pp-dp-mapping --overlap-grad-reduce --ddp-bucket-size 1000"
    ),
    "pp2 cp2": f"--world-size 4 {CP2} {PP2} --micro-batch-size 4",
    "pp2 vpp2 dp2 overlapped, recompute full": (
        f"--world-size 4 {LOOPED} --overlap-grad-reduce --ddp-bucket-size 1000 --micro-batch-size 1 {FULL}"
    ),
    "pp2 offloaded": f"--world-size 2 {PP2} {OFFLOADED}",
    "pp2 vpp2, offloaded": f"--world-size 2 {LOOPED} --micro-batch-size 1 {OFFLOADED}",
    "pp2 zb-h1 tp2 sp, offloaded": f"--world-size 4 {TP2} {SP} {PP2} {ZB_H1} {OFFLOADED}",
    "pp2 zb-v, offloaded": f"--world-size 2 {VEE} {OFFLOADED}",
    "pp2 zb-h1 tp2 sp, recompute full": f"--world-size 4 {TP2} {SP} {PP2} {ZB_H1} {FULL}",
    "pp2 zb-h1 dp2 zero overlapped": (
        f"--world-size 4 {PP2} {ZB_H1} {ZERO_OVERLAPPED} --ddp-bucket-size 1000 --micro-batch-size 1"
    ),
    "pp2 zb-v dp2 zero overlapped": (
        f"--world-size 4 {VEE} {ZERO_OVERLAPPED} --ddp-bucket-size 1000 --micro-batch-size 1"
    ),
    "pp2 zb-h1 tp4, a head a rank": f"--world-size 8 {TP4} {PP2} {ZB_H1} --micro-batch-size 4",
    "pp2 zb-v tp2, recompute selective": (
        f"--world-size 4 {TP2} {VEE} {SELECTIVE} --recompute-modules core_attn layernorm"
    ),
    "pp2 zb-v dp2 overlapped, recompute full": (
        f"--world-size 4 {VEE} --overlap-grad-reduce --ddp-bucket-size 1000 {FULL}"
    ),
}
EIGHT_RANKS: dict[str, str] = {
    "pp2 vpp2 tp2 sp dp2 zero": f"--world-size 8 {TP2} {SP} {LOOPED} {ZERO_OVERLAPPED} --ddp-bucket-size 1000",
    "pp2 zb-v tp2 sp dp2 zero": f"--world-size 8 {TP2} {SP} {VEE} {ZERO_OVERLAPPED} --ddp-bucket-size 1000",
    "pp2 vpp2 cp2 tp2 sp, recompute full": f"--world-size 8 {TP2} {SP} {CP2} {LOOPED} --micro-batch-size 4 {FULL}",
}
MANY_STAGES: dict[str, str] = {
    "pp4 vpp2, one sample at a time": (
        f"--world-size 4 {PP4} --num-virtual-stages-per-pipeline-rank 2 --micro-batch-size 1"
    ),
    "pp2 vpp4": f"--world-size 2 {PP2} --num-virtual-stages-per-pipeline-rank 4",
    "pp3 vpp3, microbatches that don't divide": f"--world-size 3 {PP3} --num-virtual-stages-per-pipeline-rank 3",
    "pp4 zb-v": f"--world-size 4 {PP4} --pipeline-schedule zb-v --micro-batch-size 1",
}
"""Other microbatches, or heads or sequences on other ranks, would draw other masks than the reference."""
SAME_DROPOUT = {name: layout for name, layout in (STAGES | COMBINED).items() if draws_the_same(layout)}


def deep(variant: str, *, layers: int) -> str:
    """A variant of the table with another number of layers."""
    return f"{(VARIANTS | DRAWING)[variant]} --num-layers {layers}"


@pytest.mark.parametrize(
    ("variant", "layout"),
    pairs(
        ["gpt2 tied", "gpt2 untied", "llama", "llama tied, qk norm, documents", LATENT, *LATER, *BERT],
        STAGES,
        rich=("pp2 zb-v", "pp4", "pp2 vpp2", "pp2 zb-h1", "pp3, fully masked microbatch"),
        more={"gpt2 tied": ("pp2 gpipe",)},
        light=["gpt2 tied", "gpt2 untied", "llama"],
    ),
)
def test_stages_compute_the_model_of_one_rank(variant: str, layout: str) -> None:
    """A lost, doubled or late gradient between stages would train another model."""
    check(train_at(deep(variant, layers=5), STAGES[layout]), [train_alone(deep(variant, layers=5))])


@pytest.mark.parametrize(
    ("variant", "layout"),
    pairs(
        ["gpt2 tied", "llama", "bert"],
        COMBINED,
        rich=(
            "pp2 zb-v dp2 zero overlapped",
            "pp2 zb-h1 tp2 sp, recompute full",
            "pp2 zb-v tp2, recompute selective",
        ),
        # One other schedule offloads, and slices and outer replicas are in test_context.py and test_t5.py.
        slow=(
            "pp2 offloaded",
            "pp2 zb-h1 tp2 sp, offloaded",
            "pp2 zb-v, offloaded",
            "pp2 cp2",
            "pp2 dp2 zero overlapped",
            "pp2 zb-v dp2 overlapped, recompute full",
        ),
    ),
)
def test_stages_combine_with_other_ways(variant: str, layout: str) -> None:
    """Each way of dividing work may be right alone and wrong together."""
    check(train_at(deep(variant, layers=5), COMBINED[layout]), [train_alone(deep(variant, layers=5))])


@pytest.mark.parametrize(
    ("variant", "layout"),
    pairs(
        ["gpt2 tied", "llama tied, qk norm, documents", *BERT],
        EIGHT_RANKS,
        rich=("pp2 zb-v tp2 sp dp2 zero",),
        # Above, in stages of four ranks or two; and interleaved stages are above, too.
        slow=("gpt2 tied", "bert, residuals behind norms", "bert", "pp2 vpp2 tp2 sp dp2 zero"),
    ),
)
def test_everything_at_once(variant: str, layout: str) -> None:
    """The layouts that large runs use."""
    check(train_at(deep(variant, layers=5), EIGHT_RANKS[layout]), [train_alone(deep(variant, layers=5))])


@pytest.mark.parametrize(
    ("variant", "layout"),
    pairs(["gpt2 tied", "llama", "bert"], MANY_STAGES, rich=("pp2 vpp4", "pp4 zb-v", "pp4 vpp2, one sample at a time")),
)
def test_many_stages(variant: str, layout: str) -> None:
    """Chunks of one rank must not be taken for one another."""
    check(train_at(deep(variant, layers=9), MANY_STAGES[layout]), [train_alone(deep(variant, layers=9))])


@pytest.mark.parametrize(
    ("variant", "layout"),
    pairs(
        DRAWING,
        SAME_DROPOUT,
        rich=("pp2 zb-v", "pp2 vpp2"),
        slow=[name for name in SAME_DROPOUT if name not in ("pp2 zb-v", "pp2 vpp2")],  # masks know no schedule
    ),
)
def test_dropout_does_not_depend_on_stages(variant: str, layout: str) -> None:
    """Masks are of a sample and a layer, wherever and whenever that is computed, and recomputed."""
    check(train_at(deep(variant, layers=5), SAME_DROPOUT[layout]), [train_alone(deep(variant, layers=5))])
