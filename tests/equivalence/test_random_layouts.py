"""Layouts drawn at random each run, so that what is compared with one rank isn't only what somebody thought of.

A failure names its seed; ``LAYOUT_SEED=seed`` draws the same again.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch

from megatron.config.moe import MoEConfig
from megatron.config.parallel import CpCommType, head_exchange_size
from megatron.core.parallel.context import ParallelContext
from megatron.core.transformer.block import RecomputePlan
from megatron.errors import ParallelError
from tests.equivalence.families import GLOBAL_BATCH, LENGTH
from tests.equivalence.test_equivalence import LLAMA, SMALL, STILL, check, train_at
from tests.equivalence.test_experts import experts
from tests.equivalence.training import Layout, train
from tests.tiers import tiers

DRAWS, SOON, MOST_RANKS = 6, 2, 8
"""Draws, and how many of them are in the default tier."""

RECOMPUTATION = [
    RecomputePlan(),
    RecomputePlan("selective"),
    RecomputePlan("selective", modules=("moe", "mlp")),
    RecomputePlan("selective", modules=("core_attn", "moe_act", "shared_experts")),
    RecomputePlan("full"),
    RecomputePlan("full", "uniform", 2),
    RecomputePlan("full", "block", 1),
]


def draw_model(rng: random.Random) -> dict[str, Any]:
    """Settings of a small model without dropout, in half of the cases with experts."""
    layers: dict[str, Any] = {
        "num_layers": rng.randint(4, 8),
        "untie_embeddings_and_output_weights": rng.random() < 0.5,
        "groups": draw_experts(rng),
    }
    if rng.random() < 0.5:
        return SMALL | STILL | layers | {"num_attention_heads": 8, "document_ids": rng.random() < 0.5}
    groups = {"num_query_groups": rng.choice([1, 2, 4, 8]), "qk_layernorm": rng.random() < 0.5}
    return LLAMA | STILL | layers | groups | {"document_ids": rng.random() < 0.5}


def draw_experts(rng: random.Random) -> tuple[MoEConfig, ...]:
    """Settings of experts, of which some layers have none. A loss over microbatches depends on how many there are, so
    losses are over sequences and tokens.
    """
    if rng.random() < 0.5:
        return ()
    score = rng.choice(["softmax", "sigmoid"])
    groups = {"moe_router_num_groups": 4, "moe_router_group_topk": 2} if rng.random() < 0.3 else {}
    return experts(
        moe_layer_freq=rng.choice(["1", "2"]),
        moe_router_score_function=score,
        moe_router_topk=rng.choice([2, 4]),
        moe_router_load_balancing_type=("seq_aux_loss",),
        moe_aux_loss_coeff=(rng.choice([0.0, 0.3]),),
        moe_z_loss_coeff=rng.choice([None, 0.1]),
        moe_router_enable_expert_bias=score == "sigmoid" and rng.random() < 0.5,
        moe_router_bias_update_rate=0.1,
        moe_expert_capacity_factor=rng.choice([None, None, 0.9]),
        moe_shared_expert_intermediate_size=rng.choice([None, 16]),
        moe_token_dispatcher_type=rng.choice(["alltoall", "alltoall", "allgather"]),
        **groups,
    )


def draw_layout(rng: random.Random, model: dict[str, Any]) -> Layout:
    """A layout of up to eight ranks that fits the model."""
    while True:
        tp, cp, dp, pp = (rng.choice([1, 1, 2, 2, 4]) for _ in range(4))
        if 1 < tp * cp * dp * pp <= MOST_RANKS:
            break
    schedule, chunks = rng.choice(
        [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)] if pp > 1 else [("1f1b", 1)]
    )
    if pp * chunks > model["num_layers"]:
        schedule, chunks = "1f1b", 1
    levels = rng.choice([(size, cp // size) for size in (1, 2, 4) if cp % size == 0])
    every: tuple[CpCommType, ...] = ("p2p", "all_gather", "a2a", "a2a+p2p")
    fitting = [kind for kind in every if heads_fit(kind, cp, levels, tp, model)]
    kinds = tuple(rng.choice(fitting) for _ in range(rng.choice([1, model["num_layers"]])))
    overlap, has_experts = rng.random() < 0.5, bool(model["groups"])
    ep, etp = rng.choice([(ep, etp) for ep in (1, 2, 4, 8) for etp in (1, 2, 4) if tp * cp * dp % (ep * etp) == 0])
    return Layout(
        tp=tp,
        cp=cp,
        dp=dp,
        pp=pp,
        chunks=chunks,
        schedule=schedule,
        overlap_p2p=rng.random() < 0.7,
        pp_before_dp=rng.random() < 0.7,
        sequence_parallel=tp > 1 and LENGTH // cp % tp == 0 and rng.random() < 0.6,
        sharded=rng.random() < 0.5,
        overlap=overlap,
        bucket_size=rng.choice([None, 1000, 3000]),
        micro_batch_size=rng.choice([size for size in (1, 2, 4) if GLOBAL_BATCH % (size * dp) == 0]),
        recompute=rng.choice(RECOMPUTATION),
        cp_comm_types=kinds,
        cp_sizes=levels,
        ep=ep if has_experts else 1,
        etp=etp if has_experts else None,
    )


def heads_fit(kind: CpCommType, cp: int, levels: tuple[int, int], tp: int, model: dict[str, Any]) -> bool:
    """Whether ranks that exchange heads get whole ones."""
    ranks = head_exchange_size(kind, cp, levels)
    heads: int = model["num_attention_heads"] // tp
    groups: int = max(1, model.get("num_query_groups", model["num_attention_heads"]) // tp)
    return heads % ranks == 0 and (groups % ranks == 0 or ranks % groups == 0)


@pytest.mark.parametrize("number", tiers(range(DRAWS), first=range(SOON)))
def test_a_random_layout_computes_the_model_of_one_rank(number: int) -> None:
    """Ways to divide work that are right alone, and in every pair, may be wrong together."""
    seed = int(os.environ.get("LAYOUT_SEED") or random.SystemRandom().randrange(1 << 32))
    rng = random.Random(seed + number)
    model = draw_model(rng)
    layout = draw_layout(rng, model)
    reference = train(ParallelContext.single(dtype=torch.float64), model, Layout(micro_batch_size=GLOBAL_BATCH))
    try:
        check(train_at(model, layout), [reference])
    except (AssertionError, ParallelError) as error:
        raise AssertionError(f"LAYOUT_SEED={seed}, draw {number}: {model} at {layout}") from error
