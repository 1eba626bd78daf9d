"""Experts of BERT, of its fine-tuning and of both stacks of T5 at every kind of layout, against one rank."""

from __future__ import annotations

import pytest

from tests.equivalence.flags import EXPERTS, RELATIVE, SMALL
from tests.equivalence.test_equivalence import check
from tests.equivalence.test_experts import LAYOUTS
from tests.equivalence.training import train_alone, train_at
from tests.tiers import pairs

LOSSES = "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.3 0.2 --moe-z-loss-coeff 0.1"
BIASED = (
    "--moe-router-topk 3 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 0.1 --moe-expert-capacity-factor 0.8 --moe-shared-expert-intermediate-size 16"
)
VARIANTS: dict[str, str] = {
    "bert, losses of layers": (
        f"bert: {SMALL} {EXPERTS} --num-layers 4 --moe-layer-freq 2 {LOSSES} --moe-per-layer-logging"
    ),
    "bert, capacity, bias, shared experts, gathered": (
        f"bert: {SMALL} {EXPERTS} --num-layers 4 {LOSSES} {BIASED} --moe-token-dispatcher-type allgather"
    ),
    "t5, losses of layers": (
        f"t5: {SMALL} {EXPERTS} --num-layers 5 --moe-layer-freq 2 {LOSSES} --moe-per-layer-logging"
    ),
    "t5, capacity, bias, shared experts, a dense encoder layer": (
        f"t5: {RELATIVE} {EXPERTS} --num-layers 5 --moe-layer-freq [0]+[1]*7 {LOSSES} {BIASED}"
    ),
    "t5, counted padding": f"t5: {SMALL} {EXPERTS} --num-layers 5 {LOSSES} --moe-count-padding",
    "classes": f"classes: {SMALL} {EXPERTS} --num-layers 4 {LOSSES} {BIASED}",
    "choices": f"choices: {SMALL} {EXPERTS} --num-layers 4 --moe-aux-loss-coeff 0.3 --moe-count-padding",
}
RICH = ("tp2 dp2 ep2 zero", "tp2 sp ep2 etp1")
MORE = {
    "t5, capacity, bias, shared experts, a dense encoder layer": ("pp2 ep2 interleaved", "dp2 ep2 recompute moe"),
    "bert, capacity, bias, shared experts, gathered": ("cp2 ep2",),
}


HERE = {
    name: LAYOUTS[name]
    for name in (
        *RICH,
        "ep2 etp2 over all",
        "pp2 tp2 sp ep2 etp1 zb-v recompute",
        "cp2 ep2",
        "ep4",
        "pp2 ep2 interleaved",
        "pp2 ep2 zb-h1",
        "dp2 ep2 recompute moe",
        "dp2 ep2, offloaded",
        "tp2 sp cp2 dp2 ep4 etp1 zero",
    )
}


@pytest.mark.parametrize(
    ("variant", "layout"),
    pairs(
        VARIANTS,
        HERE,
        rich=RICH,
        more=MORE,
        # GPT's experts are there, and the others of these layouts show that both stacks are told apart.
        slow=("tp2 sp cp2 dp2 ep4 etp1 zero", "ep4", "pp2 ep2 zb-h1", "dp2 ep2, offloaded", "t5, counted padding"),
    ),
)
def test_layout_computes_the_model_of_one_rank(variant: str, layout: str) -> None:
    """A decoder's router whose loss is a mean over the encoder's tokens trains another model, and so does padding that
    a rank sends to experts.
    """
    check(train_at(VARIANTS[variant], HERE[layout]), [train_alone(VARIANTS[variant])])
