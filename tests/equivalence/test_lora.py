"""Low-rank adapters on every kind of linear layer, at every kind of layout, against one rank."""

from __future__ import annotations

import pytest
import torch

from megatron.config.lora import is_adapter
from megatron.training.evaluation.parity import logical
from tests.equivalence.flags import (
    CP2,
    EP2,
    ETP1,
    EXPERTS,
    FULL,
    FUSED,
    LATENT,
    LLAMA,
    LOOPED,
    PP2,
    SELECTIVE,
    SMALL,
    SP,
    TP2,
    TP8,
    VEE,
    ZB_H1,
    ZERO_OVERLAPPED,
)
from tests.equivalence.test_equivalence import check
from tests.equivalence.training import train_alone, train_at
from tests.tiers import pairs

RANK, EIGHT = "--lora-rank 3 --lora-alpha 5 --pretrained-checkpoint unread", f"{SMALL} --num-attention-heads 8"
VARIANTS: dict[str, str] = {
    "llama": f"{LLAMA} --num-layers 4 {RANK}",
    "q and v, with biases": (
        f"{EIGHT} --num-layers 4 {RANK} --lora-rank-stabilized --lora-targets q_proj v_proj linear_fc1"
    ),
    "experts, shared ones too": (
        f"{LLAMA} --num-layers 4 {EXPERTS} --moe-router-topk 2 --moe-shared-expert-intermediate-size 16 {RANK}"
    ),
    "experts' last layer, and norms": (
        f"{LLAMA} --num-layers 4 {EXPERTS} --moe-router-topk 2 {RANK} --lora-targets linear_fc2 gate_proj "
        "--train-only '*layernorm*'"
    ),
    "latent attention": (
        f"{LATENT} --num-layers 4 --q-lora-rank 8 {RANK} --lora-targets linear_q_down_proj linear_q_up_proj "
        "linear_kv_down_proj linear_proj linear_fc1 linear_fc2"
    ),
    "hybrid": (
        f"{LLAMA} --num-layers 4 --hybrid-layer-pattern M*-M --mamba-head-dim 4 --mamba-state-dim 8 "
        f"--mamba-num-groups 2 {RANK} --lora-targets in_proj out_proj linear_qkv linear_fc1 linear_fc2"
    ),
    "t5": f"t5: {EIGHT} --num-layers 2 {RANK} --lora-targets linear_qkv linear_kv linear_q linear_proj linear_fc1",
    "bert": f"bert: {EIGHT} --num-layers 4 {RANK} --train-only 'lm_head.*'",
}

LAYOUTS: dict[str, str] = {
    "tp2 sp": f"--world-size 2 {TP2} {SP} {ETP1} {SELECTIVE}",
    "tp2 sp ep2 dp2 zero": f"--world-size 4 {TP2} {SP} {EP2} {ZERO_OVERLAPPED} --ddp-bucket-size 1000 {FULL}",
    "tp2 etp2 cp2": f"--world-size 4 {TP2} {CP2} --expert-tensor-parallel-size 2",
    "tp8": f"--world-size 8 {TP8} {ETP1}",
    "dp2 zero 2": "--world-size 2 --zero-stage 2",
    "tp2 dp2 zero 3": f"--world-size 4 {TP2} {SP} {ETP1} --zero-stage 3 {FULL}",
    "pp2 zb-h1 dp2 zero, accumulation fused": f"--world-size 4 {PP2} {ZB_H1} {ZERO_OVERLAPPED} {FUSED}",
    "pp2 vpp2": f"--world-size 2 {LOOPED} {FULL}",
    "pp2 zb-v dp2 zero 3": f"--world-size 4 {VEE} --zero-stage 3",
}


@pytest.mark.parametrize(
    ("variant", "layout"),
    pairs(
        VARIANTS,
        LAYOUTS,
        rich=("tp2 sp ep2 dp2 zero", "tp2 dp2 zero 3"),
        # Their parts are above, and T5 has BERT's layers.
        slow=("tp8", "pp2 zb-v dp2 zero 3", "dp2 zero 2", "tp2 sp", "bert"),
    ),
)
def test_layouts_train_the_same_adapters(variant: str, layout: str) -> None:
    """An adapter beside a split layer was applied to a part of its input, added once for each rank, or had a part of
    its gradient; or what is frozen moved.
    """
    outcomes = train_at(VARIANTS[variant], LAYOUTS[layout])
    check(outcomes, [train_alone(VARIANTS[variant])])
    initial, weights = logical(outcomes, "initial"), logical(outcomes, "weights")
    moved = {name for name in initial if not torch.equal(initial[name], weights[name])}
    assert {name for name in initial if is_adapter(name)} <= moved
    others = {name for name in moved if not is_adapter(name)}
    assert all("layernorm" in name or name.startswith("lm_head") for name in others)
    assert bool(others) == ("--train-only" in VARIANTS[variant])
