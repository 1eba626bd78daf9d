"""Gated delta nets, with attention and in a hybrid, at every layout against one rank."""

from __future__ import annotations

import pytest

from tests.equivalence.flags import (
    CP2,
    CP4,
    EP2,
    FULL,
    LATER,
    LLAMA,
    PP3,
    SELECTIVE,
    SP,
    TP2,
    TP4,
    TP8,
    ZB_H1,
    ZERO,
    ZERO_OVERLAPPED,
)
from tests.equivalence.test_equivalence import check
from tests.equivalence.training import train_alone, train_at
from tests.tiers import pairs

SIZES = (
    "--linear-num-key-heads 4 --linear-num-value-heads 8 --linear-key-head-dim 6 --linear-value-head-dim 5 "
    "--linear-attention-chunk-size 3"
)
NETS = f"--experimental-attention-variant gated_delta_net {SIZES}"
VARIANTS: dict[str, str] = {
    "with gated attention, 1p, documents": (
        f"{LLAMA} {NETS} --num-layers 3 --linear-attention-freq [1,0,1] --attention-output-gate --apply-layernorm-1p "
        "--reset-attention-mask"
    ),
    "norms before, with attention that has norms after, negative eigenvalues, future tokens, muP": (
        f"{LLAMA} {NETS} {LATER} --num-layers 3 --linear-attention-freq [1,1,0] --linear-norm-placement before "
        "--norm-placement after --linear-negative-eigenvalues --linear-norm-epsilon 1e-3 --use-mup "
        "--mup-base-hidden-size 8"
    ),
    "hybrid with experts": (
        f"{LLAMA} {SIZES} --num-layers 6 --hybrid-layer-pattern GE*-GE --num-experts 4 --moe-ffn-hidden-size 16 "
        "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1"
    ),
}
LAYOUTS: dict[str, str] = {
    "tp2 sp": f"--world-size 2 {TP2} {SP} --micro-batch-size 4",
    "tp4 recompute": f"--world-size 4 {TP4} --micro-batch-size 4 {FULL}",
    "tp8, shared key heads": f"--world-size 8 {TP8} --micro-batch-size 4",
    "cp2 heads": f"--world-size 2 {CP2} --micro-batch-size 4",
    "cp4 states": f"--world-size 4 {CP4} --micro-batch-size 4 --linear-cp-comm-type states",
    "cp2 tp2 sp heads": f"--world-size 4 {TP2} {SP} {CP2} --micro-batch-size 4",
    "cp2 tp2 states": f"--world-size 4 {TP2} {CP2} --micro-batch-size 4 --linear-cp-comm-type states",
    "cp2 tp4, heads of shared keys": f"--world-size 8 {TP4} {CP2} --micro-batch-size 4",
    "pp3": f"--world-size 3 {PP3} --micro-batch-size 2",
    "cp2 tp2 recompute nets": f"--world-size 4 {TP2} {CP2} {SELECTIVE} --recompute-modules layernorm gated_delta_net",
    "pp3 dp2 zero, zb-h1": (
        f"--world-size 6 {PP3} {ZB_H1} {ZERO_OVERLAPPED} --ddp-bucket-size 3000 --micro-batch-size 1"
    ),
    "dp2 ep2 zero": f"--world-size 2 {ZERO} {EP2}",
}


@pytest.mark.parametrize(
    ("variant", "layout"),
    pairs(
        VARIANTS,
        LAYOUTS,
        rich=("cp2 tp2 states", "cp2 tp4, heads of shared keys", "pp3 dp2 zero, zb-h1"),
        more={"with gated attention, 1p, documents": ("cp2 tp2 sp heads",)},
        # Others contain them.
        slow=(
            "tp2 sp",
            "tp4 recompute",
            "cp2 heads",
            "cp4 states",
            "pp3",
            "tp8, shared key heads",
            "cp2 tp2 recompute nets",
        ),
    ),
)
def test_layout_computes_the_model_of_one_rank(variant: str, layout: str) -> None:
    """A shared key head, a state that is passed on, or the norm that heads share: a wrong sum trains another model."""
    check(train_at(VARIANTS[variant], LAYOUTS[layout]), [train_alone(VARIANTS[variant])])
