"""The rows of the table with pipeline stages: every schedule, with every other way of dividing the work.

Models are deeper than in the other rows, and their layers don't divide evenly over the stages.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from megatron.core.parallel.context import ParallelContext
from megatron.core.transformer.block import RecomputePlan
from megatron.training.evaluation.parity import Observed
from tests.equivalence.test_equivalence import DRAWING, HALVES, VARIANTS, check, train_at
from tests.equivalence.training import Layout, train
from tests.tiers import pairs

FULL, SELECTIVE = RecomputePlan("full"), RecomputePlan("selective", modules=("core_attn", "layernorm"))
OFFLOADED = RecomputePlan(offloaded=9, least_offloaded=1)
VEE: dict[str, Any] = {"pp": 2, "chunks": 2, "schedule": "zb-v"}
LOOPED: dict[str, Any] = {"pp": 2, "chunks": 2, "schedule": "interleaved"}
OVERLAPPED: dict[str, Any] = {"overlap": True, "bucket_size": 1000}
LATER = ("future tokens, documents", "future tokens, tied, norms after, latent attention")
LATENT = "latent attention, yarn with a factor of scores, documents"
BERT = ("bert", "bert, residuals behind norms")

STAGES: dict[str, Layout] = {
    "pp2 gpipe": Layout(pp=2, schedule="gpipe"),
    "pp2, transfers not overlapped": Layout(pp=2, overlap_p2p=False),
    "pp2, one microbatch": Layout(pp=2, micro_batch_size=8),
    "pp3, fully masked microbatch": Layout(pp=3, micro_batch_size=1),
    "pp4": Layout(pp=4),
    "pp2 vpp2": Layout(**LOOPED),
    "pp2 zb-h1": Layout(pp=2, schedule="zb-h1"),
    "pp4 zb-h1": Layout(pp=4, schedule="zb-h1", micro_batch_size=1),
    "pp2 zb-v": Layout(**VEE),
    "pp2 zb-v, transfers not overlapped": Layout(**VEE, overlap_p2p=False),
}
COMBINED: dict[str, Layout] = {
    "pp2 tp2 sp": Layout(pp=2, tp=2, sequence_parallel=True, **HALVES),
    "pp2 tp2 gpipe recompute selective": Layout(pp=2, tp=2, schedule="gpipe", recompute=SELECTIVE, **HALVES),
    "pp2 dp2 zero overlapped": Layout(pp=2, dp=2, sharded=True, overlap=True, bucket_size=3000),
    "dp2 outside pp2, overlapped": Layout(pp=2, dp=2, **OVERLAPPED, pp_before_dp=False),
    "pp2 cp2": Layout(pp=2, cp=2, **HALVES),
    "pp2 vpp2 dp2 overlapped, recompute full": Layout(**LOOPED, dp=2, **OVERLAPPED, recompute=FULL, micro_batch_size=1),
    "pp2 offloaded": Layout(pp=2, recompute=OFFLOADED),
    "pp2 vpp2, offloaded": Layout(**LOOPED, recompute=OFFLOADED, micro_batch_size=1),
    "pp2 zb-h1 tp2 sp, offloaded": Layout(pp=2, schedule="zb-h1", tp=2, sequence_parallel=True, recompute=OFFLOADED),
    "pp2 zb-v, offloaded": Layout(**VEE, recompute=OFFLOADED),
    "pp2 zb-h1 tp2 sp, recompute full": Layout(pp=2, schedule="zb-h1", tp=2, sequence_parallel=True, recompute=FULL),
    "pp2 zb-h1 dp2 zero overlapped": Layout(
        pp=2, schedule="zb-h1", dp=2, sharded=True, **OVERLAPPED, micro_batch_size=1
    ),
    "pp2 zb-v dp2 zero overlapped": Layout(**VEE, dp=2, sharded=True, **OVERLAPPED, micro_batch_size=1),
    "pp2 zb-h1 tp4, a head a rank": Layout(pp=2, schedule="zb-h1", tp=4, **HALVES),
    "pp2 zb-v tp2, recompute selective": Layout(**VEE, tp=2, recompute=SELECTIVE),
    "pp2 zb-v dp2 overlapped, recompute full": Layout(**VEE, dp=2, **OVERLAPPED, recompute=FULL),
}
EIGHT_RANKS: dict[str, Layout] = {
    "pp2 vpp2 tp2 sp dp2 zero": Layout(**LOOPED, tp=2, sequence_parallel=True, dp=2, sharded=True, **OVERLAPPED),
    "pp2 zb-v tp2 sp dp2 zero": Layout(**VEE, tp=2, sequence_parallel=True, dp=2, sharded=True, **OVERLAPPED),
    "pp2 vpp2 cp2 tp2 sp, recompute full": Layout(
        **LOOPED, cp=2, tp=2, sequence_parallel=True, recompute=FULL, **HALVES
    ),
}
MANY_STAGES: dict[str, Layout] = {
    "pp4 vpp2, one sample at a time": Layout(pp=4, chunks=2, schedule="interleaved", micro_batch_size=1),
    "pp2 vpp4": Layout(pp=2, chunks=4, schedule="interleaved"),
    "pp3 vpp3, microbatches that don't divide": Layout(pp=3, chunks=3, schedule="interleaved"),
    "pp4 zb-v": Layout(pp=4, chunks=2, schedule="zb-v", micro_batch_size=1),
}
"""Other microbatches, or heads or sequences on other ranks, would draw other masks than the reference."""
SAME_DROPOUT = {
    name: layout
    for name, layout in (STAGES | COMBINED).items()
    if layout.tp == layout.cp == 1 and layout.micro_batch_size == 2
}


def settings(variant: str, *, layers: int) -> dict[str, Any]:
    """A variant of the table with another number of layers."""
    return (VARIANTS | DRAWING)[variant] | {"num_layers": layers}


@functools.cache
def reference(variant: str, *, layers: int) -> list[Observed]:
    """Three steps on one rank."""
    return [train(ParallelContext.single(dtype=torch.float64), settings(variant, layers=layers), Layout())]


@pytest.mark.parametrize(
    ("variant", "layout"),
    pairs(
        ["gpt2 tied", "gpt2 untied", "llama", "llama tied, qk norm, documents", LATENT, *LATER, *BERT],
        STAGES,
        rich=("pp2 zb-v", "pp4", "pp2 vpp2"),
    ),
)
def test_stages_compute_the_model_of_one_rank(variant: str, layout: str) -> None:
    """A lost, doubled or late gradient between stages would train another model."""
    check(train_at(settings(variant, layers=5), STAGES[layout]), reference(variant, layers=5))


@pytest.mark.parametrize(
    ("variant", "layout"),
    pairs(
        ["gpt2 tied", "llama", "bert"],
        COMBINED,
        rich=("pp2 zb-v dp2 zero overlapped",),
    ),
)
def test_stages_combine_with_other_ways(variant: str, layout: str) -> None:
    """Each way of dividing work may be right alone and wrong together."""
    check(train_at(settings(variant, layers=5), COMBINED[layout]), reference(variant, layers=5))


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
    check(train_at(settings(variant, layers=5), EIGHT_RANKS[layout]), reference(variant, layers=5))


@pytest.mark.parametrize(
    ("variant", "layout"),
    pairs(["gpt2 tied", "llama", "bert"], MANY_STAGES, rich=("pp2 vpp4", "pp4 zb-v")),
)
def test_many_stages(variant: str, layout: str) -> None:
    """Chunks of one rank must not be taken for one another."""
    check(train_at(settings(variant, layers=9), MANY_STAGES[layout]), reference(variant, layers=9))


@pytest.mark.parametrize(
    ("variant", "layout"),
    pairs(DRAWING, SAME_DROPOUT, rich=("pp2 zb-v",)),
)
def test_dropout_does_not_depend_on_stages(variant: str, layout: str) -> None:
    """Masks are of a sample and a layer, wherever and whenever that is computed, and recomputed."""
    check(train_at(settings(variant, layers=5), SAME_DROPOUT[layout]), reference(variant, layers=5))
