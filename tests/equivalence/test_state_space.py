"""Hybrids with state-space layers at every kind of layout against one rank."""

from __future__ import annotations

import pytest

from tests.equivalence.flags import (
    CP2,
    CP4,
    EP2,
    ETP1,
    FULL,
    LOOPED,
    OFFLOADED,
    PP2,
    PP3,
    SELECTIVE,
    SP,
    TP2,
    TP4,
    VEE,
    ZB_H1,
    ZERO_OVERLAPPED,
)
from tests.equivalence.test_equivalence import check
from tests.equivalence.training import train_alone, train_at
from tests.tiers import pairs

HYBRID = (
    "--hidden-size 32 --num-attention-heads 4 --init-method-std 0.2 --position-embedding-type none "
    "--normalization RMSNorm --activation squared_relu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --mamba-state-dim 3 --mamba-head-dim 4 --mamba-num-heads 8 "
    "--mamba-chunk-size 3"
)
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 16 --moe-aux-loss-coeff 0.3"
VARIANTS: dict[str, str] = {
    "four groups, attention, MLP, experts": f"{HYBRID} --mamba-num-groups 4 --hybrid-layer-pattern M*ME-M {EXPERTS}",
    "one group, documents": (
        f"{HYBRID} --mamba-num-groups 1 --hybrid-layer-pattern M-*MM* --reset-attention-mask "
        "--mamba-time-step-limits 0.005 0.05"
    ),
    "two groups, documents, future tokens": (
        f"{HYBRID} --mamba-num-groups 2 --hybrid-layer-pattern MM*-MM/M*-/M*- --reset-attention-mask "
        "--mtp-loss-scaling-factor 0.7"
    ),
}
STATES = "--mamba-cp-comm-type states"
LAYOUTS: dict[str, str] = {
    "one rank, recompute full": f"{FULL}",
    "tp2": f"--world-size 2 {TP2}",
    "tp4 sp": f"--world-size 4 {TP4} {SP} {ETP1}",
    "cp4": f"--world-size 4 {CP4}",
    "cp2 states": f"--world-size 2 {CP2} {STATES}",
    "cp4 states, tp2 sp": f"--world-size 8 {CP4} {TP2} {SP} {ETP1} {STATES}",
    "cp2 tp2 sp zero, recompute mamba": (
        f"--world-size 8 {CP2} {TP2} {SP} {EP2} {ETP1} {ZERO_OVERLAPPED} --ddp-bucket-size 1000 {SELECTIVE} "
        "--recompute-modules core_attn mamba"
    ),
    "dp2 ep2 zero, offloaded": f"--world-size 2 {EP2} {ZERO_OVERLAPPED} {OFFLOADED}",
    "pp3": f"--world-size 3 {PP3}",
    "pp2 tp2 interleaved, recompute mamba and norms": (
        f"--world-size 4 {TP2} {LOOPED} {SELECTIVE} --recompute-modules layernorm mamba"
    ),
    "pp2 cp2 states, zb-h1": f"--world-size 4 {CP2} {STATES} {PP2} {ZB_H1}",
    "pp2 tp2 sp zb-v": f"--world-size 4 {TP2} {SP} {ETP1} {VEE}",
}


LONG = "two groups, documents, future tokens"
RICH = ("cp2 tp2 sp zero, recompute mamba", "cp4 states, tp2 sp", "cp4")
MORE = {
    "four groups, attention, MLP, experts": ("cp2 states",),
    "one group, documents": ("tp2",),
    LONG: ("pp3",),  # of its stages one has the layers of later tokens alone
}


@pytest.mark.parametrize(
    ("variant", "layout"),
    pairs(VARIANTS, LAYOUTS, rich=RICH, more=MORE, light=[each for each in VARIANTS if each != LONG]),
)
def test_layout_takes_the_steps_of_one_rank(variant: str, layout: str) -> None:
    """Heads, groups, documents or states that a layout divides in another place train another model."""
    check(train_at(VARIANTS[variant], LAYOUTS[layout]), [train_alone(VARIANTS[variant])])
