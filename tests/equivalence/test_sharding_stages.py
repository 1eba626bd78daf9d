"""ZeRO 2 and 3 train what one rank trains: models with everything that owns weights, at layouts of every kind."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.equivalence.flags import (
    CP2,
    EP2,
    ETP1,
    EXPERTS,
    FULL,
    FUSED,
    HYBRID,
    LATENT_TIED,
    LATER,
    LLAMA,
    LLAMA_TIED,
    LOOPED,
    OFFLOADED,
    PP2,
    PP4,
    SELECTIVE,
    SMALL,
    SP,
    TP2,
    VEE,
    ZB_H1,
    ZERO_2,
    ZERO_3,
)
from tests.equivalence.test_equivalence import check
from tests.equivalence.training import train_alone, train_at
from tests.tiers import pairs

STAGES = {"2": ZERO_2, "3": ZERO_3, "3, gathered once a step": f"{ZERO_3} --torch-fsdp2-no-reshard-after-forward"}
AUX_LOSS = "--moe-aux-loss-coeff 0.1 --moe-router-load-balancing-type seq_aux_loss"
MAMBA = "--mamba-state-dim 3 --mamba-head-dim 4 --mamba-num-heads 8 --mamba-num-groups 2"
UNIFORM = f"{FULL} --recompute-method uniform --recompute-num-layers 2"

"""Of four layers each, so that every schedule has stages for them."""
VARIANTS: dict[str, str] = {
    "llama": f"{LLAMA} --num-layers 4",
    "gpt2 tied": f"{SMALL} --num-layers 4",
    "llama tied, experts": f"{LLAMA_TIED} --num-layers 4 {EXPERTS} {AUX_LOSS} --moe-shared-expert-intermediate-size 16",
    "latent attention, later tokens": f"{LATENT_TIED} --num-layers 4 {LATER} --norm-placement both",
    "frozen: embedding, every second layer": f"{LLAMA} --num-layers 4 --freeze 'embedding.*' 'decoder.layers.[02].*'",
    "frozen: all but the head": f"{LLAMA} --num-layers 4 --freeze '[!o]*'",
    "bert": f"bert: {SMALL} --num-layers 4",
    "t5": f"t5: {SMALL} --num-layers 4",
    "hybrid": f"{HYBRID} {MAMBA} --hybrid-layer-pattern M*E-",
}
LAYOUTS: dict[str, str] = {
    "dp2, accumulation": "--world-size 2 --micro-batch-size 1",
    "dp2 overlapped, small buckets": (
        "--world-size 2 --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 1000 --micro-batch-size 1"
    ),
    "tp2 sp dp2, recompute, accumulation fused": f"--world-size 4 {TP2} {SP} {FULL} {FUSED}",
    "tp2 dp2, several layers recomputed together": f"--world-size 4 {TP2} {UNIFORM} --micro-batch-size 1",
    "cp2 dp2, recompute selective": f"--world-size 4 {CP2} {SELECTIVE} --overlap-grad-reduce --overlap-param-gather",
    "dp2 offloaded": f"--world-size 2 {OFFLOADED}",
    "ep2": f"--world-size 2 {EP2}",
    "dp4 ep2, accumulation fused": f"--world-size 4 {EP2} {FUSED} --micro-batch-size 1",
    "tp2 sp ep2 dp2": f"--world-size 4 {TP2} {SP} {EP2} {ETP1}",
    "pp2 dp2": f"--world-size 4 {PP2} --micro-batch-size 1",
    "pp2 vpp2 dp2, overlapped": (
        f"--world-size 4 {LOOPED} --micro-batch-size 1 --overlap-grad-reduce --overlap-param-gather"
    ),
    "pp2 zb-h1 dp2, accumulation fused": f"--world-size 4 {PP2} {ZB_H1} {FUSED} --micro-batch-size 1",
    "pp2 zb-v dp2, recompute": f"--world-size 4 {VEE} {FULL} --micro-batch-size 1",
    "pp4 dp2": f"--world-size 8 {PP4} --micro-batch-size 1",
    "tp2 sp cp2 dp2": f"--world-size 8 {TP2} {SP} {CP2}",
    "tp2 sp pp2 zb-h1 dp2": f"--world-size 8 {TP2} {SP} {PP2} {ZB_H1} --micro-batch-size 1",
}


RICH = ("dp2 overlapped, small buckets", "dp2, accumulation")
LIGHT = ("llama", "gpt2 tied", "frozen: embedding, every second layer", "frozen: all but the head", "hybrid")
MORE = {"llama tied, experts": ("ep2", "tp2 sp ep2 dp2")}  # others have none to divide
SLOW = ("dp4 ep2, accumulation fused", "tp2 sp cp2 dp2", "tp2 sp pp2 zb-h1 dp2")  # their parts are among the others


def _cases() -> list[Any]:
    """Each pair at both stages; of the pairs of the default tier, both stages in turn are in it, and ZeRO 3 first."""
    stages, found = itertools.cycle(("3", "2")), list[Any]()
    for pair in pairs(VARIANTS, LAYOUTS, rich=RICH, more=MORE, slow=SLOW, light=LIGHT):
        first = None if pair.marks else next(stages)
        found += [
            pytest.param(stage, *pair.values, marks=[] if stage == first else pytest.mark.slow) for stage in ("2", "3")
        ]
    return found


@pytest.mark.parametrize(("stage", "variant", "layout"), _cases())
def test_stage_trains_what_one_rank_trains(stage: str, variant: str, layout: str) -> None:
    """A unit gathered too late or freed too early, gradients of a microbatch that no rank sums, or sums twice, and
    weights drawn apart would each train another model.
    """
    outcomes = train_at(VARIANTS[variant], f"{LAYOUTS[layout]} {STAGES[stage]}")
    check(outcomes, [train_alone(VARIANTS[variant])])


@pytest.mark.parametrize(
    "variant", [pytest.param(each, marks=pytest.mark.slow) for each in VARIANTS if each != "llama"] + ["llama"]
)
def test_weights_that_are_gathered_once_a_step_are_those_of_the_step(variant: str) -> None:
    """Kept from the step before, they would be those before the update."""
    outcomes = train_at(VARIANTS[variant], f"{LAYOUTS[RICH[0]]} {STAGES['3, gathered once a step']}")
    check(outcomes, [train_alone(VARIANTS[variant])])
