"""The rows of the table with products in FP8: every layout rounds what one rank rounds, so their numbers agree to 1e-9.

Numbers are rounded to three bits, or two, so a scale or a block that differed anywhere would show in the first digits.
Scales belong to a microbatch, except those of earlier iterations, so microbatches are equal in both runs. Widths are
such that ranks don't cut blocks.
"""

from __future__ import annotations

import pytest

from megatron.training.evaluation.parity import Observed
from tests.equivalence.flags import (
    CP2,
    EP2,
    ETP1,
    ETP2,
    EXPERTS,
    FULL,
    FUSED,
    LLAMA,
    LOOPED,
    PP2,
    SELECTIVE,
    SMALL,
    SP,
    TP2,
    ZB_H1,
    ZERO_2,
    ZERO_3,
    ZERO_OVERLAPPED,
)
from tests.equivalence.test_delta_nets import NETS
from tests.equivalence.test_equivalence import check
from tests.equivalence.training import run_of, train_alone, train_at
from tests.tiers import pairs, tiers

VARIANTS: dict[str, str] = {
    "tensorwise": f"{LLAMA} --bf16 --fp8-format hybrid --fp8-recipe tensorwise",
    "tensorwise e4m3, biases, wide gradients of weights, ends in bf16": (
        f"{SMALL} --num-layers 4 --bf16 --fp8-format e4m3 --fp8-recipe tensorwise --no-fp8-wgrad "
        "--first-last-layers-bf16 --num-layers-at-end-in-bf16 2"
    ),
    "delayed": f"{LLAMA} --bf16 --fp8-format hybrid",
    "delayed, history": (
        f"{SMALL} --bf16 --fp8-format e4m3 --fp8-margin 1 --fp8-amax-history-len 2 --fp8-amax-compute-algo max "
        "--fp8-recipe delayed"
    ),
    "blockwise": (
        f"{LLAMA} --hidden-size 256 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 256 "
        "--bf16 --fp8-format e4m3 --fp8-recipe blockwise"
    ),
    "mxfp8": f"{LLAMA} --hidden-size 64 --bf16 --fp8-format e4m3 --fp8-recipe mxfp8",
    "experts, tensorwise": (
        f"{LLAMA} {EXPERTS} --moe-ffn-hidden-size 32 --bf16 --fp8-format hybrid --fp8-recipe tensorwise"
    ),
    "state space, tensorwise": (
        "--hybrid-layer-pattern M*M- --hidden-size 32 --num-attention-heads 4 --init-method-std 0.2 "
        "--position-embedding-type none --mamba-head-dim 8 --mamba-num-groups 2 --mamba-state-dim 4 --bf16 "
        "--fp8-format hybrid --fp8-recipe tensorwise"
    ),
    "gated delta nets and gated attention, tensorwise": (
        f"{LLAMA} {NETS} --linear-attention-freq 2 --attention-output-gate --bf16 --fp8-format hybrid "
        "--fp8-recipe tensorwise"
    ),
    "experts, delayed": f"{LLAMA} {EXPERTS} --moe-ffn-hidden-size 32 --bf16 --fp8-format hybrid",
}
LAYOUTS: dict[str, str] = {
    "one rank, recompute full": f"--micro-batch-size 4 {FULL}",
    "one rank, recompute selective": f"{SELECTIVE} --recompute-modules core_attn layernorm",
    "one rank, accumulation fused": f"{FUSED} --micro-batch-size 4",
    "tp2 sp, recompute norms": (
        f"--world-size 2 {TP2} {SP} --micro-batch-size 4 {SELECTIVE} --recompute-modules layernorm mlp"
    ),
    "tp2": f"--world-size 2 {TP2} --micro-batch-size 4",
    "tp2 sp": f"--world-size 2 {TP2} {SP} --micro-batch-size 4",
    "tp2 sp, rows of a rank cut blocks": f"--world-size 2 {TP2} {SP}",
    "dp2 zero overlapped": f"--world-size 2 {ZERO_OVERLAPPED} --ddp-bucket-size 1000 --micro-batch-size 4",
    "pp2 zb-h1": f"--world-size 2 {PP2} {ZB_H1}",
    "pp2 vpp2": f"--world-size 2 {LOOPED}",
    "pp2 zb-h1 tp2 sp, recompute full": f"--world-size 4 {TP2} {SP} {PP2} {ZB_H1} --micro-batch-size 4 {FULL}",
    "tp2 sp dp2 zero recompute": f"--world-size 4 {TP2} {SP} {ZERO_OVERLAPPED} --ddp-bucket-size 3000 {FULL}",
    "tp2 sp, experts not divided": f"--world-size 2 {TP2} {SP} {ETP1} --micro-batch-size 4",
    "dp2 ep2": f"--world-size 2 {EP2} --micro-batch-size 4",
    "cp2": f"--world-size 2 {CP2} --micro-batch-size 4",
    "cp2 tp2 sp": f"--world-size 4 {TP2} {SP} {CP2} --micro-batch-size 4",
}
"""Ranks that divide a sequence cut its blocks of tokens, in the gradients of weights."""
CUT = {(variant, layout) for variant in ("blockwise", "mxfp8") for layout in LAYOUTS if "cp2" in layout}
"""Rows of an expert have scales of their own on each rank, unless iterations before have set them."""
CUT |= {
    ("experts, tensorwise", layout) for layout in LAYOUTS if "cp2" in layout or "ep2" in layout or "not div" in layout
}
DEEP = {"pp2 vpp2"}


def alone(row: str, micro_batch_size: int) -> Observed:
    """The table's steps on one rank, with the microbatches of a layout."""
    return train_alone(row, f"--micro-batch-size {micro_batch_size}")


def check_at(row: str, layout: str) -> None:
    """The row computes at the layout what it computes on one rank, with microbatches of the same size."""
    size = run_of(row, layout)[1].training.micro_batch_size
    check(train_at(row, layout), [alone(row, size)])


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
    check_at(VARIANTS[variant] + (" --num-layers 4" if layout in DEEP else ""), LAYOUTS[layout])


EIGHT_BITS, OVERLAPPED = "--fp8-param-gather", "--overlap-grad-reduce --overlap-param-gather"
GATHERING = f"{ZERO_OVERLAPPED} --ddp-bucket-size 3000 --fp8-param-gather"
GATHERED: dict[str, tuple[str, str]] = {
    "tensorwise, tp2 sp dp2": ("tensorwise", f"--world-size 4 {TP2} {SP} {GATHERING} --micro-batch-size 4"),
    "delayed, tp2 dp2": ("delayed", f"--world-size 4 {TP2} {GATHERING} --micro-batch-size 4"),
    "history, dp2": ("delayed, history", f"--world-size 2 {GATHERING} --micro-batch-size 4"),
    "ends in bf16, pp2 dp2": (
        "tensorwise e4m3, biases, wide gradients of weights, ends in bf16",
        f"--world-size 4 {PP2} {ZB_H1} {GATHERING} --micro-batch-size 4",
    ),
    "blocks that shards cut, dp2": ("blockwise", f"--world-size 2 {GATHERING} --micro-batch-size 4"),
    "blocks that shards cut, dp4": ("blockwise", f"--world-size 4 {GATHERING}"),
    "tensorwise, cp2": ("tensorwise", f"--world-size 2 {CP2} {GATHERING} --micro-batch-size 4"),
    "experts, tensorwise, dp2": ("experts, tensorwise", f"--world-size 2 {GATHERING} --micro-batch-size 4"),
    "experts, delayed, dp4 ep2": ("experts, delayed", f"--world-size 4 {EP2} {GATHERING}"),
    "tensorwise, dp2 zero 2": ("tensorwise", f"--world-size 2 {ZERO_2} {EIGHT_BITS} --micro-batch-size 4"),
    "delayed, tp2 sp dp2 zero 3": (
        "delayed",
        f"--world-size 4 {TP2} {SP} {ZERO_3} {OVERLAPPED} {EIGHT_BITS} --micro-batch-size 4",
    ),
    "blocks that shards cut, dp4 zero 3 in two copies, state over both": (
        "blockwise",
        f"--world-size 4 {ZERO_3} --num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy optim "
        f"{EIGHT_BITS}",
    ),
    "tensorwise, dp4 zero 1 in two copies": (
        "tensorwise",
        f"--world-size 4 {GATHERING} --num-distributed-optimizer-instances 2",
    ),
    "history, dp2 zero 3, recompute": (
        "delayed, history",
        f"--world-size 2 {ZERO_3} {FULL} {EIGHT_BITS} --micro-batch-size 4",
    ),
    "ends in bf16, pp2 dp2 zero 3": (
        "tensorwise e4m3, biases, wide gradients of weights, ends in bf16",
        f"--world-size 4 {PP2} {ZB_H1} {ZERO_3} {EIGHT_BITS} --micro-batch-size 4",
    ),
    "experts, delayed, dp4 ep2 zero 3": ("experts, delayed", f"--world-size 4 {EP2} {ZERO_3} {EIGHT_BITS}"),
    "experts, delayed, tp2 etp2 dp2": (
        "experts, delayed",
        f"--world-size 4 {TP2} {ETP2} {GATHERING} --micro-batch-size 4",
    ),
}


FIRST_GATHERED = [name for name in GATHERED if "copies" in name or "zero 2" in name or "zero 3" in name][:3]
FIRST_GATHERED += [*GATHERED][:3]


@pytest.mark.parametrize("name", tiers(GATHERED, first=FIRST_GATHERED))
def test_weights_gathered_in_8_bits_are_those_that_ranks_would_quantize(name: str) -> None:
    """--fp8-param-gather: shards cut weights and their blocks, and their scales belong to the whole."""
    variant, layout = GATHERED[name]
    check_at(VARIANTS[variant], layout)


def test_scales_of_earlier_iterations_don_t_depend_on_microbatches() -> None:
    """Those of delayed scaling belong to a step."""
    check([alone(VARIANTS["delayed"], 2)], [alone(VARIANTS["delayed"], 8)])


def test_products_are_in_fp8() -> None:
    """Else all of the above would hold of a run that ignores the flags."""
    first = "step 1, lm loss"
    found = [alone(VARIANTS[name], 2).losses[first] for name in ("tensorwise", "delayed")]
    expected = alone(LLAMA, 2).losses[first]
    assert all(1e-6 < abs(each - expected) < 0.1 for each in found)
