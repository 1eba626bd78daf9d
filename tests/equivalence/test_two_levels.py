"""Hybrid sharding trains what one rank trains: gradients are summed inside of copies and over them.

Faults here are silent on one level: with two copies of the same data everything would agree.
"""

from __future__ import annotations

import pytest

from tests.equivalence.flags import (
    CP2,
    EP2,
    ETP1,
    FULL,
    FUSED,
    LLAMA,
    LOOPED,
    OFFLOADED,
    PP2,
    SP,
    TP2,
    ZB_H1,
    ZERO,
    ZERO_2,
    ZERO_3,
    ZERO_OVERLAPPED,
)
from tests.equivalence.test_equivalence import check
from tests.equivalence.test_optimizers import GROUPS
from tests.equivalence.test_sharding_stages import VARIANTS as MODELS
from tests.equivalence.training import train_alone, train_at
from tests.tiers import pairs

COPIES_2, COPIES_4 = (f"--num-distributed-optimizer-instances {copies}" for copies in (2, 4))
OVER_BOTH = f"{COPIES_2} --outer-dp-sharding-strategy optim"
OVERLAPPED = "--overlap-grad-reduce --overlap-param-gather"

VARIANTS: dict[str, str] = {
    **{
        name: MODELS[name]
        for name in ("llama", "llama tied, experts", "frozen: embedding, every second layer", "t5", "hybrid")
    },
    "muon": f"{GROUPS} --num-layers 4 --optimizer muon --muon-nesterov",
    "adafactor, moving average": f"{LLAMA} --num-layers 4 --optimizer adafactor --ema-decay 0.9",
}
LAYOUTS: dict[str, str] = {
    "1: dp4 overlapped, small buckets": (
        f"--world-size 4 {ZERO_OVERLAPPED} {COPIES_2} --ddp-bucket-size 1000 --micro-batch-size 1"
    ),
    "1: dp4, copies of one rank": f"--world-size 4 {ZERO} {COPIES_4} --micro-batch-size 1",
    "1: tp2 cp2 dp2 ep2, pipeline ranks side by side": (
        f"--world-size 8 {TP2} {CP2} {EP2} {ZERO} {COPIES_2} --use-tp-pp-dp-mapping --micro-batch-size 1"
    ),
    "2: dp4 ep2": f"--world-size 4 {EP2} {ZERO_2} {COPIES_2} --micro-batch-size 1",
    "2: pp2 zb-h1 dp4": f"--world-size 8 {PP2} {ZB_H1} {ZERO_2} {COPIES_2} --micro-batch-size 1",
    "3: tp2 sp dp4, recompute, accumulation fused": (
        f"--world-size 8 {TP2} {SP} {FULL} {FUSED} {ZERO_3} {COPIES_2} --micro-batch-size 1"
    ),
    "3: cp2 dp2 overlapped": f"--world-size 4 {CP2} {ZERO_3} {COPIES_2} {OVERLAPPED} --micro-batch-size 1",
    "3: dp4 ep2, state over both": f"--world-size 4 {EP2} {ZERO_3} {OVER_BOTH} --micro-batch-size 1",
    "3: dp4 overlapped, offloaded, state over both": (
        f"--world-size 4 {ZERO_3} {OVER_BOTH} {OVERLAPPED} {OFFLOADED} --optimizer-cpu-offload --micro-batch-size 1"
    ),
    "3: pp2 vpp2 dp4, state over both": f"--world-size 8 {LOOPED} {ZERO_3} {OVER_BOTH} --micro-batch-size 1",
    "3: tp2 sp dp4 ep4, copies with whole experts, state over both": (
        f"--world-size 8 {TP2} {SP} {ETP1} --expert-model-parallel-size 4 {ZERO_3} {OVER_BOTH} --micro-batch-size 1"
    ),
}
RICH = (
    "3: dp4 ep2, state over both",
    "3: dp4 overlapped, offloaded, state over both",
    "2: dp4 ep2",
    "1: dp4 overlapped, small buckets",
)
MORE = {
    "muon": ("1: dp4 overlapped, small buckets",),  # whole matrices in buckets that end within them
    # Without experts these would be copies like any others.
    "llama tied, experts": ("2: dp4 ep2", "3: tp2 sp dp4 ep4, copies with whole experts, state over both"),
}
# Copies of tensor-parallel ranks, of slices and of stages are in the others.
SLOW = (
    "1: tp2 cp2 dp2 ep2, pipeline ranks side by side",
    "3: tp2 sp dp4, recompute, accumulation fused",
    "3: pp2 vpp2 dp4, state over both",
)
LIGHT = ("llama", "frozen: embedding, every second layer")


@pytest.mark.parametrize(("variant", "layout"), pairs(VARIANTS, LAYOUTS, rich=RICH, more=MORE, slow=SLOW, light=LIGHT))
def test_copies_train_what_one_rank_trains(variant: str, layout: str) -> None:
    """A shard that is not summed over the copies, summed twice, or counted twice in the norm, or a portion that its
    copies never get, would train another model on each.
    """
    check(train_at(VARIANTS[variant], LAYOUTS[layout]), [train_alone(VARIANTS[variant])])
