"""Training on recorded answers, at every kind of layout, against one rank."""

from __future__ import annotations

import pytest

from tests.equivalence.flags import CP2, EP2, ETP1, EXPERTS, FULL, FUSED, LLAMA, PP2, SELECTIVE, SP, TP2, ZB_H1
from tests.equivalence.flags import VEE as ZB_V
from tests.equivalence.test_equivalence import check
from tests.equivalence.training import at, train, train_alone
from tests.harness import run_ranks
from tests.tiers import pairs

SHAPE = f"{LLAMA} --num-layers 4 --load unread --perform-rl-step --grpo-max-new-tokens 8 --grpo-kl-beta 0.3"
VARIANTS: dict[str, str] = {
    "grpo": f"{SHAPE} --grpo-clamp-eps-lower 0.3 --grpo-clamp-eps-upper 0.6 --grpo-entropy-term-weight 0.2",
    "dapo, experts, temperature": (
        f"{SHAPE} {EXPERTS} --moe-router-topk 2 --grpo-loss-type dapo --rl-default-temperature 0.8"
    ),
    "bnpo at once, adapters": (
        f"{SHAPE} --grpo-loss-type bnpo --lora-rank 3 --grpo-iterations 1 --grpo-prompts-per-step 4"
    ),
}
LAYOUTS: dict[str, str] = {
    "tp2 sp cp2": f"--world-size 4 {TP2} {SP} {CP2} {ETP1} {SELECTIVE}",
    "cp2 dp2 zero 2, one at a time": f"--world-size 4 {CP2} --zero-stage 2 --micro-batch-size 1",
    "tp2 sp ep2 dp2 zero 1": f"--world-size 4 {TP2} {SP} {EP2} {ETP1} --zero-stage 1 {FULL}",
    "tp2 dp2 zero 3": f"--world-size 4 {TP2} {SP} {ETP1} --zero-stage 3 {FULL}",
    "pp2 zb-h1 dp2, accumulation fused": f"--world-size 4 {PP2} {ZB_H1} {FUSED}",
    "pp2 zb-v cp2": f"--world-size 4 {ZB_V} {CP2}",
}


@pytest.mark.parametrize(
    ("variant", "layout"),
    pairs(
        VARIANTS,
        LAYOUTS,
        rich=("tp2 sp cp2", "tp2 sp ep2 dp2 zero 1", "pp2 zb-h1 dp2, accumulation fused"),
        slow=("pp2 zb-v cp2", "tp2 dp2 zero 3"),  # the second is in test_preferences.py
    ),
)
def test_layouts_train_on_the_same_answers(variant: str, layout: str) -> None:
    """An answer that context-parallel ranks divide, and counts that are known to some of them only: a part that is left
    out, or counted twice, gives another loss, gradient or reward.
    """
    row = VARIANTS[variant]
    ranks = run_ranks(train, row, LAYOUTS[layout], **at(row, LAYOUTS[layout]))
    check(ranks, [train_alone(VARIANTS[variant])])
