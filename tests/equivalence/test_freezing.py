"""The rows of the table with frozen parameters: what stays as it was, and everything else, at layouts of every kind."""

from __future__ import annotations

import pytest
import torch

from megatron.config.parameter_names import matches
from megatron.training.evaluation.parity import Observed, logical
from tests.equivalence.flags import (
    CP2,
    FULL,
    FUSED,
    LLAMA,
    LOOPED,
    PP2,
    PP4,
    SELECTIVE,
    SMALL,
    SP,
    TP2,
    VEE,
    ZB_H1,
    ZERO_OVERLAPPED,
)
from tests.equivalence.test_equivalence import check
from tests.equivalence.training import run_of, train_alone, train_at
from tests.tiers import pairs

"""What is frozen, of which model: ends and middles, whole stages, the tied matrix, and parts of every layer."""
VARIANTS: dict[str, str] = {
    "embedding": f"{SMALL} --num-layers 5 --freeze 'embedding.*' --untie-embeddings-and-output-weights",
    "tied embedding": f"{SMALL} --num-layers 5 --freeze 'embedding.word_embeddings.weight'",
    "first half": f"{LLAMA} --num-layers 5 --freeze 'embedding.*' 'decoder.layers.[012].*'",
    "last half": (
        f"{LLAMA} --num-layers 5 --freeze 'decoder.layers.[34].*' 'decoder.final_layernorm.*' 'output_layer.*'"
    ),
    "matrices": f"{SMALL} --num-layers 5 --freeze '*.linear_*.weight' 'embedding.*'",
    "norms and biases": f"{SMALL} --num-layers 5 --freeze '*layernorm*' '*.bias'",
    "all but the head": f"{LLAMA} --num-layers 5 --freeze '[!o]*'",
    "all but positions": f"{SMALL} --num-layers 5 --freeze 'decoder.*' 'embedding.word_embeddings.*'",
    "t5's encoder": f"t5: {SMALL} --num-layers 3 --freeze 'encoder.*' 'embedding.*'",
    "all but the gates, which have a loss of their own": (
        f"gated: {LLAMA} --num-layers 4 --freeze 'embedding.*' 'output_layer.*' '*layernorm*' '*.linear_*'"
    ),
    "gates": f"gated: {LLAMA} --num-layers 4 --freeze 'embedding.*' '*.gated_mlp.*'",
    "embedding, with other learning rates of layers": (
        f"{LLAMA} --num-layers 5 --freeze 'embedding.*' --lr-multipliers 'decoder.layers.[02].*=0.3' '*.weight=1.7'"
    ),
    "bert's body": f"bert: {SMALL} --num-layers 5 --freeze 'embedding.*' 'encoder.*'",
}
LAYOUTS: dict[str, str] = {
    "one rank, recompute full": f"{FULL}",
    "tp2 sp dp2 zero, recompute full": f"--world-size 4 {TP2} {SP} {ZERO_OVERLAPPED} --ddp-bucket-size 1000 {FULL}",
    "cp2 tp2": f"--world-size 4 {TP2} {CP2} {SELECTIVE}",
    "pp4": f"--world-size 4 {PP4}",
    "pp2 vpp2 dp2 zero": f"--world-size 4 {LOOPED} {ZERO_OVERLAPPED} --ddp-bucket-size 1000 {FULL}",
    "pp2 zb-h1": f"--world-size 2 {PP2} {ZB_H1} --micro-batch-size 1 {FULL}",
    "pp2 zb-v dp2 zero": f"--world-size 4 {VEE} {ZERO_OVERLAPPED} --ddp-bucket-size 1000",
    "pp2 zb-h1, accumulation fused": f"--world-size 2 {PP2} {ZB_H1} {FUSED} --micro-batch-size 1 {FULL}",
    "tp2 sp pp2 dp2 zero": f"--world-size 8 {TP2} {SP} {PP2} {ZERO_OVERLAPPED} --ddp-bucket-size 1000 {FULL}",
    "tp2 pp2 zb-h1 dp2 zero": (
        f"--world-size 8 {TP2} {PP2} {ZB_H1} {ZERO_OVERLAPPED} --ddp-bucket-size 1000 {SELECTIVE}"
    ),
    "tp2 sp pp2 zb-v dp2 zero": f"--world-size 8 {TP2} {SP} {VEE} {ZERO_OVERLAPPED} --ddp-bucket-size 1000 {FULL}",
}


def frozen_in(row: str, outcomes: list[Observed]) -> set[str]:
    """The parameters that a row freezes, as outcomes show them: without a gradient, and as they were; only they are."""
    patterns = run_of(row)[1].optimizer.freeze
    initial, weights = logical(outcomes, "initial"), logical(outcomes, "weights")
    frozen = {name for name in initial if matches(name, patterns)}
    assert frozen.isdisjoint(logical(outcomes, "gradients"))
    assert frozen == {name for name in initial if torch.equal(initial[name], weights[name])}
    return frozen


@pytest.mark.parametrize(
    ("variant", "layout"),
    pairs(
        VARIANTS,
        LAYOUTS,
        rich=("tp2 sp dp2 zero, recompute full", "pp2 zb-v dp2 zero"),
        # Their parts are above, at four ranks, or they are parts of those.
        slow=(
            "tp2 sp pp2 dp2 zero",
            "tp2 pp2 zb-h1 dp2 zero",
            "pp2 vpp2 dp2 zero",
            "tp2 sp pp2 zb-v dp2 zero",
            "one rank, recompute full",
            "pp2 zb-h1",
        ),
    ),
)
def test_layouts_train_what_is_not_frozen(variant: str, layout: str) -> None:
    """A frozen weight cut the gradient of what is before it (sequence parallelism gathered without autograd), got a
    gradient of its own, or took part in a collective of some ranks alone.
    """
    outcomes = train_at(VARIANTS[variant], LAYOUTS[layout])
    check(outcomes, [train_alone(VARIANTS[variant])])
    assert frozen_in(VARIANTS[variant], outcomes)
