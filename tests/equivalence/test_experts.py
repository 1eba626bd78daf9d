"""Experts at every kind of layout against one rank: routers, balancing losses, folded grids, ZeRO, recomputation."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.config.moe import MoEConfig
from megatron.core.moe import experts as core_experts
from megatron.core.parallel.context import ParallelContext
from megatron.core.transformer.block import RecomputePlan
from megatron.training.evaluation.parity import Observed
from tests.equivalence.test_equivalence import LATENT, LATER, LLAMA, SMALL, STILL, check, train_at
from tests.equivalence.training import Layout, train
from tests.harness import run_ranks
from tests.tiers import pairs


def experts(**settings: Any) -> tuple[MoEConfig]:
    """Eight of them, narrow."""
    sizes: dict[str, Any] = {"num_experts": 8, "moe_ffn_hidden_size": 16}
    return (MoEConfig(**sizes | settings),)


GLOBAL = "a loss over all replicas, future tokens, losses of layers"
PADDED = "padding, capacity, bias, losses, shared experts, future tokens"
VARIANTS: dict[str, dict[str, Any]] = {
    "softmax, all losses": LLAMA
    | STILL
    | {
        "num_layers": 4,
        "groups": experts(
            moe_router_load_balancing_type=("aux_loss", "seq_aux_loss"),
            moe_aux_loss_coeff=(0.3, 0.2),
            moe_z_loss_coeff=0.1,
            moe_per_layer_logging=True,
        ),
    },
    GLOBAL: LLAMA
    | STILL
    | LATER
    | {
        "num_layers": 4,
        "groups": experts(
            moe_layer_freq="[0]+[1]*3",
            moe_router_load_balancing_type=("global_aux_loss", "seq_aux_loss"),
            moe_aux_loss_coeff=(0.5, 0.1),
            moe_per_layer_logging=True,
        ),
    },
    "sigmoid, groups, shared experts behind a gate, a dense layer": LLAMA
    | STILL
    | {
        "num_layers": 4,
        "groups": experts(
            moe_layer_freq="[0]+[1]*3",
            moe_router_score_function="sigmoid",
            moe_router_topk=4,
            moe_router_num_groups=4,
            moe_router_group_topk=2,
            moe_router_topk_scaling_factor=2.5,
            moe_router_load_balancing_type=("seq_aux_loss",),
            moe_aux_loss_coeff=(0.3,),
            moe_shared_expert_intermediate_size=24,
            moe_shared_expert_gate=True,
        ),
    },
    "bias that balances, one expert for a token": LLAMA
    | STILL
    | {
        "num_layers": 4,
        "groups": experts(
            moe_router_score_function="sigmoid",
            moe_router_topk=1,
            moe_router_enable_expert_bias=True,
            moe_router_bias_update_rate=0.1,
            moe_shared_expert_intermediate_size=16,
        ),
    },
    "capacity, all tokens to all ranks": LLAMA
    | STILL
    | {
        "num_layers": 4,
        "groups": experts(
            moe_expert_capacity_factor=0.8,
            moe_router_topk=3,
            moe_router_load_balancing_type=("aux_loss",),
            moe_aux_loss_coeff=(0.3,),
            moe_token_dispatcher_type="allgather",
        ),
    },
    "capacity by position": LLAMA
    | STILL
    | {
        "num_layers": 4,
        "groups": experts(moe_expert_capacity_factor=0.8, moe_token_drop_policy="position"),
    },
    "latent attention, groups, bias, shared experts, future tokens": LATENT
    | LATER
    | {
        "num_layers": 3,
        "groups": experts(
            moe_layer_freq="[0]+[1]*2",
            moe_router_score_function="sigmoid",
            moe_router_topk=4,
            moe_router_num_groups=4,
            moe_router_group_topk=2,
            moe_router_enable_expert_bias=True,
            moe_router_bias_update_rate=0.1,
            moe_shared_expert_intermediate_size=16,
        ),
    },
    PADDED: LLAMA
    | STILL
    | LATER
    | {
        "num_layers": 4,
        "document_ids": True,
        "text_mask": True,
        "mtp_text_mask": True,
        "groups": experts(
            moe_layer_freq="[0]+[1]*3",
            moe_router_score_function="sigmoid",
            moe_router_topk=3,
            moe_router_enable_expert_bias=True,
            moe_router_bias_update_rate=0.1,
            moe_expert_capacity_factor=0.8,
            moe_router_load_balancing_type=("aux_loss", "seq_aux_loss"),
            moe_aux_loss_coeff=(0.3, 0.2),
            moe_z_loss_coeff=0.1,
            moe_shared_expert_intermediate_size=16,
        ),
    },
    "sinkhorn, padding, all tokens to all ranks": LLAMA
    | STILL
    | {
        "num_layers": 4,
        "text_mask": True,
        "groups": experts(
            moe_router_load_balancing_type=("sinkhorn",),
            moe_z_loss_coeff=0.1,
            moe_token_dispatcher_type="allgather",
        ),
    },
    "biases, softmax before the choice": SMALL
    | STILL
    | {"num_layers": 4, "groups": experts(moe_router_pre_softmax=True, moe_layer_freq="2", moe_ffn_hidden_size=32)},
}

FULL = RecomputePlan("full")
OFFLOADED = RecomputePlan(offloaded=9, least_offloaded=1)
MOE = RecomputePlan("selective", modules=("core_attn", "layernorm", "mlp", "moe"))
PARTS = RecomputePlan("selective", modules=("layernorm", "moe_act", "shared_experts", "mla_up_proj"))
LAYOUTS: dict[str, Layout] = {
    "one rank, recompute full": Layout(recompute=FULL),
    "dp2 ep2, offloaded": Layout(dp=2, ep=2, recompute=OFFLOADED),
    "ep2": Layout(dp=2, ep=2),
    "ep4": Layout(dp=4, ep=4),
    "tp2 ep2 etp1": Layout(tp=2, ep=2, etp=1),
    "tp2 sp ep2 etp1": Layout(tp=2, sequence_parallel=True, ep=2, etp=1),
    "tp2 etp1": Layout(tp=2, etp=1),
    "tp2 etp2": Layout(tp=2),
    "etp2 over dp": Layout(dp=2, etp=2),
    "cp2 ep2": Layout(cp=2, ep=2),
    "ep2 etp2 over all": Layout(dp=2, cp=2, ep=2, etp=2, recompute=FULL),
    "tp2 dp2 ep2 zero": Layout(tp=2, dp=2, ep=2, etp=1, sharded=True, overlap=True, bucket_size=1000),
    "tp2 sp dp2 ep2 etp2 zero recompute": Layout(
        tp=2, sequence_parallel=True, dp=2, ep=2, sharded=True, overlap=True, bucket_size=3000, recompute=FULL
    ),
    "tp2 sp cp2 dp2 ep4 etp1 zero": Layout(
        tp=2, sequence_parallel=True, cp=2, dp=2, ep=4, etp=1, sharded=True, bucket_size=1000
    ),
    "pp2 ep2 interleaved": Layout(pp=2, chunks=2, schedule="interleaved", dp=2, ep=2),
    "pp2 ep2 zb-h1": Layout(pp=2, dp=2, ep=2, schedule="zb-h1", sharded=True, overlap=True, bucket_size=3000),
    "pp2 ep2 zb-h1, accumulation fused": Layout(
        pp=2, dp=2, ep=2, schedule="zb-h1", sharded=True, overlap=True, bucket_size=3000, fuses_accumulation=True
    ),
    "pp2 tp2 sp ep2 etp1 zb-v recompute": Layout(
        pp=2, chunks=2, tp=2, sequence_parallel=True, ep=2, etp=1, schedule="zb-v", recompute=FULL
    ),
    "dp2 ep2 recompute moe": Layout(dp=2, ep=2, recompute=MOE),
    "pp2 tp2 sp ep2 etp1 zb-h1 recompute parts of moe and attention": Layout(
        pp=2, tp=2, sequence_parallel=True, ep=2, etp=1, schedule="zb-h1", recompute=PARTS
    ),
    "data outside of the pipeline, tp2 etp1": Layout(pp=2, tp=2, etp=1, pp_before_dp=False),
    "data outside of the pipeline, ep4 over tp2 dp2": Layout(pp=2, tp=2, ep=4, etp=1, dp=2, pp_before_dp=False),
}


@functools.cache
def reference(variant: str) -> Observed:
    """Three steps on one rank."""
    return train(
        ParallelContext.single(dtype=torch.float64), VARIANTS[variant], at_equal_microbatches(variant, Layout())
    )


def at_equal_microbatches(variant: str, layout: Layout) -> Layout:
    """A loss over the microbatches that all replicas compute at a time is over four samples at every layout."""
    return replace(layout, micro_batch_size=4 // layout.dp) if variant == GLOBAL else layout


RICH = ("tp2 dp2 ep2 zero", "tp2 sp ep2 etp1", "ep2 etp2 over all", "pp2 tp2 sp ep2 etp1 zb-v recompute")
MORE = {
    GLOBAL: ("pp2 ep2 interleaved",),
    PADDED: ("tp2 ep2 etp1", "dp2 ep2 recompute moe"),
    "latent attention, groups, bias, shared experts, future tokens": (
        "pp2 tp2 sp ep2 etp1 zb-h1 recompute parts of moe and attention",
    ),
}


def train_in_pieces(context: ParallelContext, settings: dict[str, Any], layout: Layout) -> Observed:
    """With ranks that compute few rows at once."""
    with mock.patch.object(core_experts, "rows_at_once", return_value=5):
        return train(context, settings, layout)


def test_experts_in_pieces() -> None:
    """Split backward passes and gradient sync see one gradient of a weight, however many pieces there are."""
    layout, variant = LAYOUTS["pp2 ep2 zb-h1"], "biases, softmax before the choice"
    found = run_ranks(train_in_pieces, VARIANTS[variant], layout, pp=2, dp=2, ep=2, dtype=torch.float64, reuse=True)
    check(found, [reference(variant)])


@pytest.mark.parametrize(("variant", "layout"), pairs(VARIANTS, LAYOUTS, rich=RICH, more=MORE))
def test_layout_computes_the_model_of_one_rank(variant: str, layout: str) -> None:
    """Experts whose gradient is summed over the wrong ranks, or counted twice in the norm, train another model."""
    check(train_at(VARIANTS[variant], at_equal_microbatches(variant, LAYOUTS[layout])), [reference(variant)])
