"""The rows of the table with products in FP8: every layout rounds what one rank rounds, so their numbers agree to 1e-9.

Numbers are rounded to three bits, or two, so a scale or a block that differed anywhere would show in the first digits.
Scales belong to a microbatch, except those of earlier iterations, so microbatches are equal in both runs. Widths are
such that ranks don't cut blocks.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.core.parallel.context import ParallelContext
from megatron.core.transformer.block import RecomputePlan
from megatron.training.evaluation.parity import Observed
from tests.equivalence.test_equivalence import FULL, LLAMA, SELECTIVE, SMALL, STILL, check, train_at
from tests.equivalence.test_experts import experts
from tests.equivalence.training import Layout, train
from tests.tiers import pairs, tiers

NORMS = RecomputePlan("selective", modules=("layernorm", "mlp"))
FOUR_LAYERS: dict[str, Any] = {"num_layers": 4}
WIDE: dict[str, Any] = {"hidden_size": 256, "ffn_hidden_size": 256, "num_attention_heads": 4, "num_query_groups": 2}

VARIANTS: dict[str, dict[str, Any]] = {
    "tensorwise": LLAMA | STILL | {"fp8": {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"}},
    "tensorwise e4m3, biases, wide gradients of weights, ends in bf16": SMALL
    | STILL
    | FOUR_LAYERS
    | {
        "fp8": {
            "fp8_format": "e4m3",
            "fp8_recipe": "tensorwise",
            "fp8_wgrad": False,
            "first_last_layers_bf16": True,
            "num_layers_at_end_in_bf16": 2,
        }
    },
    "delayed": LLAMA | STILL | {"fp8": {"fp8_format": "hybrid"}},
    "delayed, history": SMALL
    | STILL
    | {
        "fp8": {
            "fp8_format": "e4m3",
            "fp8_margin": 1,
            "fp8_amax_history_len": 2,
            "fp8_amax_compute_algo": "max",
            "fp8_recipe": "delayed",
        }
    },
    "blockwise": LLAMA | STILL | WIDE | {"fp8": {"fp8_format": "e4m3", "fp8_recipe": "blockwise"}},
    "mxfp8": LLAMA | STILL | {"hidden_size": 64, "fp8": {"fp8_format": "e4m3", "fp8_recipe": "mxfp8"}},
}
EXPERTS: dict[str, Any] = LLAMA | STILL | {"groups": experts(moe_ffn_hidden_size=32)}
VARIANTS |= {
    "experts, tensorwise": EXPERTS | {"fp8": {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"}},
    "experts, delayed": EXPERTS | {"fp8": {"fp8_format": "hybrid"}},
}
HALVES: dict[str, Any] = {"micro_batch_size": 4}
LAYOUTS: dict[str, Layout] = {
    "one rank, recompute full": Layout(recompute=FULL, **HALVES),
    "one rank, recompute selective": Layout(recompute=SELECTIVE),
    "one rank, accumulation fused": Layout(micro_batch_size=4, fuses_accumulation=True),
    "tp2 sp, recompute norms": Layout(tp=2, sequence_parallel=True, recompute=NORMS, **HALVES),
    "tp2": Layout(tp=2, **HALVES),
    "tp2 sp": Layout(tp=2, sequence_parallel=True, **HALVES),
    "tp2 sp, rows of a rank cut blocks": Layout(tp=2, sequence_parallel=True),
    "dp2 zero overlapped": Layout(dp=2, sharded=True, overlap=True, bucket_size=1000, **HALVES),
    "pp2 zb-h1": Layout(pp=2, schedule="zb-h1"),
    "pp2 vpp2": Layout(pp=2, chunks=2, schedule="interleaved"),
    "pp2 zb-h1 tp2 sp, recompute full": Layout(
        pp=2, schedule="zb-h1", tp=2, sequence_parallel=True, recompute=FULL, **HALVES
    ),
    "tp2 sp dp2 zero recompute": Layout(
        tp=2, dp=2, sequence_parallel=True, sharded=True, overlap=True, bucket_size=3000, recompute=FULL
    ),
    "tp2 sp, experts not divided": Layout(tp=2, sequence_parallel=True, etp=1, **HALVES),
    "dp2 ep2": Layout(dp=2, ep=2, **HALVES),
    "cp2": Layout(cp=2, **HALVES),
    "cp2 tp2 sp": Layout(cp=2, tp=2, sequence_parallel=True, **HALVES),
}
"""Ranks that divide a sequence cut its blocks of tokens, in the gradients of weights."""
CUT = {(variant, layout) for variant in ("blockwise", "mxfp8") for layout in LAYOUTS if "cp2" in layout}
"""Rows of an expert have scales of their own on each rank, unless iterations before have set them."""
CUT |= {
    ("experts, tensorwise", layout) for layout in LAYOUTS if "cp2" in layout or "ep2" in layout or "not div" in layout
}
DEEP = {"pp2 vpp2"}


@functools.cache
def reference(variant: str, layout: str) -> Observed:
    """Three steps on one rank, with the microbatches of the layout."""
    alone = Layout(micro_batch_size=LAYOUTS[layout].micro_batch_size)
    return train(ParallelContext.single(dtype=torch.float64), settings_of(variant, layout), alone)


def settings_of(variant: str, layout: str) -> dict[str, Any]:
    return VARIANTS[variant] | (FOUR_LAYERS if layout in DEEP else {})


@pytest.mark.parametrize(
    ("variant", "layout"),
    [
        case
        for case in pairs(
            VARIANTS,
            LAYOUTS,
            rich=("tp2 sp",),
            more={
                "tensorwise": ("cp2 tp2 sp", "cp2"),
                "delayed": ("tp2 sp dp2 zero recompute",),
                "experts, delayed": ("dp2 ep2", "tp2 sp, experts not divided"),
                "mxfp8": ("tp2 sp, rows of a rank cut blocks",),
            },
        )
        if case.values not in CUT
    ],
)
def test_layout_rounds_what_one_rank_rounds(variant: str, layout: str) -> None:
    """A scale of a part of a tensor instead of all of it would train another model."""
    outcomes = train_at(settings_of(variant, layout), LAYOUTS[layout])
    check(outcomes, [reference(variant, layout)])


ZERO: dict[str, Any] = {"sharded": True, "overlap": True, "bucket_size": 3000} | HALVES
GATHERED: dict[str, tuple[str, Layout]] = {
    "tensorwise, tp2 sp dp2": ("tensorwise", Layout(tp=2, dp=2, sequence_parallel=True, **ZERO)),
    "delayed, tp2 dp2": ("delayed", Layout(tp=2, dp=2, **ZERO)),
    "history, dp2": ("delayed, history", Layout(dp=2, **ZERO)),
    "ends in bf16, pp2 dp2": (
        "tensorwise e4m3, biases, wide gradients of weights, ends in bf16",
        Layout(pp=2, dp=2, schedule="zb-h1", **ZERO),
    ),
    "blocks that shards cut, dp2": ("blockwise", Layout(dp=2, **ZERO)),
    "blocks that shards cut, dp4": ("blockwise", Layout(dp=4, **ZERO | {"micro_batch_size": 2})),
    "tensorwise, cp2": ("tensorwise", Layout(cp=2, **ZERO)),
    "experts, tensorwise, dp2": ("experts, tensorwise", Layout(dp=2, **ZERO)),
    "experts, delayed, dp4 ep2": ("experts, delayed", Layout(dp=4, ep=2, **ZERO | {"micro_batch_size": 2})),
    "experts, delayed, tp2 etp2 dp2": ("experts, delayed", Layout(tp=2, dp=2, etp=2, **ZERO)),
}


@pytest.mark.parametrize("name", tiers(GATHERED, first=[*GATHERED][:6]))
def test_weights_gathered_in_8_bits_are_those_that_ranks_would_quantize(name: str) -> None:
    """--fp8-param-gather: shards cut weights and their blocks, and their scales belong to the whole."""
    variant, layout = GATHERED[name]
    settings = VARIANTS[variant]
    alone = train(
        ParallelContext.single(dtype=torch.float64), settings, Layout(micro_batch_size=layout.micro_batch_size)
    )
    gathered = settings | {"fp8": settings["fp8"] | {"fp8_param_gather": True}}
    check(train_at(gathered, layout), [alone])


def test_scales_of_earlier_iterations_don_t_depend_on_microbatches() -> None:
    """Those of delayed scaling belong to a step."""
    settings = VARIANTS["delayed"]
    runs = [
        train(ParallelContext.single(dtype=torch.float64), settings, Layout(micro_batch_size=size)) for size in (2, 8)
    ]
    check(runs[:1], runs[1:])


def test_products_are_in_fp8() -> None:
    """Else all of the above would hold of a run that ignores the flags."""
    context = ParallelContext.single(dtype=torch.float64)
    found = [train(context, VARIANTS[name], Layout()).losses[0] for name in ("tensorwise", "delayed")]
    plain = {name: value for name, value in VARIANTS["tensorwise"].items() if name != "fp8"}
    expected = train(replace(context), plain, Layout()).losses[0]
    assert all(1e-6 < abs(each - expected) < 0.1 for each in found)
