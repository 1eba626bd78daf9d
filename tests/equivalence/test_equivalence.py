"""The table: every model variant at every layout against one rank. Tolerance 1e-9 in fp64; it only grows."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.config.parallel import CpCommType
from megatron.core.parallel.context import ParallelContext
from megatron.core.transformer.block import RecomputePlan
from megatron.training.evaluation.parity import TOLERANCE, Observed, compare
from tests.equivalence.training import Layout, train
from tests.harness import run_ranks
from tests.tiers import pairs

SMALL: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "init_method_std": 0.2}
LLAMA: dict[str, Any] = SMALL | {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "add_bias_linear": False,
    "group_query_attention": True,
    "num_query_groups": 4,
    "num_attention_heads": 8,
    "untie_embeddings_and_output_weights": True,
}
BERT: dict[str, Any] = SMALL | {"family": "bert"}
STILL: dict[str, Any] = {"attention_dropout": 0.0, "hidden_dropout": 0.0}

VARIANTS: dict[str, dict[str, Any]] = {
    "gpt2 tied": SMALL | STILL,
    "gpt2 untied": SMALL | STILL | {"untie_embeddings_and_output_weights": True},
    "llama": LLAMA | STILL,
    "llama tied, qk norm, documents": LLAMA
    | STILL
    | {"untie_embeddings_and_output_weights": False, "qk_layernorm": True, "document_ids": True},
    "geglu, rotary half interleaved, layernorm 1p": SMALL
    | STILL
    | {
        "activation": "geglu_tanh",
        "position_embedding_type": "rope",
        "rotary_percent": 0.5,
        "rotary_interleaved": True,
        "apply_layernorm_1p": True,
    },
    "bert": BERT | STILL,
    "bert, residuals behind norms": BERT
    | STILL
    | {
        "apply_residual_connection_post_layernorm": True,
        "activation": "gelu",
        "position_embedding_type": "rope",
        "untie_embeddings_and_output_weights": True,
    },
    "parallel, one norm, biases of output, mlp and logits": LLAMA
    | STILL
    | {
        "parallel_attention": True,
        "add_attention_output_bias": True,
        "add_mlp_bias": True,
        "add_output_layer_bias": True,
    },
    "parallel, two norms, norm of the embedding, bias of tied logits": SMALL
    | STILL
    | {"parallel_attention": True, "parallel_layernorm": True, "add_output_layer_bias": True, "embedding_norm": True},
    "windows and full attention, soft cap, sinks, documents": LLAMA
    | STILL
    | {
        "window_size": (3, 0),
        "window_attn_skip_freq": "2",
        "attn_logit_softcapping": 0.5,
        "softmax_type": "learnable",
        "document_ids": True,
    },
    "alibi, windows, off by one": SMALL
    | STILL
    | {
        "position_embedding_type": "alibi",
        "scale_alibi": True,
        "num_attention_heads": 8,
        "window_size": (5, 0),
        "window_attn_skip_freq": "[0,1]",
        "softmax_type": "off-by-one",
    },
    "quick geglu, clamped, offset": LLAMA
    | STILL
    | {"activation": "quick_geglu", "activation_func_clamp_value": 0.3, "glu_linear_offset": 1.0},
    "bert, windows": BERT | STILL | {"window_size": (4, 2), "window_attn_skip_freq": "[1,0]"},
    "bert, norm of the embedding instead of the first": BERT
    | STILL
    | {"embedding_norm": True, "first_attention_norm": False, "norm_parameters": "weight"},
    "squared relu, no positions, qkv bias": SMALL
    | STILL
    | {"activation": "squared_relu", "position_embedding_type": "none", "add_bias_linear": False, "add_qkv_bias": True},
}
VARIANTS |= {
    "norms after, qk norm over all heads": LLAMA
    | STILL
    | {"norm_placement": "after", "qk_layernorm": True, "qk_layernorm_kind": "all_heads", "document_ids": True},
    "norms without bias before and after, qk norm weights per head": SMALL
    | STILL
    | {"norm_placement": "both", "norm_parameters": "weight", "qk_layernorm": True, "qk_layernorm_kind": "per_head"},
    "post norm, no first norm, narrow words": SMALL
    | STILL
    | {
        "apply_residual_connection_post_layernorm": True,
        "first_attention_norm": False,
        "word_embedding_size": 8,
        "untie_embeddings_and_output_weights": False,
    },
    "norms without weights, clipped qkv": SMALL | STILL | {"norm_parameters": "none", "clip_qkv": 0.5},
    "qk l2 norm, dynamic NTK, another scale of scores": LLAMA
    | STILL
    | {
        "qk_l2_norm": True,
        "position_embedding_type": "dynamic_ntk",
        "original_max_position_embeddings": 4,
        "rotary_scaling_factor": 4.0,
        "softmax_scale": 0.2,
    },
    "multipliers, capped logits, llama 3 scaling": LLAMA
    | STILL
    | {
        "use_rope_scaling": True,
        "original_max_position_embeddings": 8,
        "embedding_multiplier": 5.0,
        "residual_multiplier": 0.3,
        "logits_multiplier": 2.0,
        "final_logit_softcapping": 1.5,
        "apply_layernorm_1p": True,
    },
}
VARIANTS |= {
    "yarn, layers without rotary positions, another base in windows": LLAMA
    | STILL
    | {
        "position_embedding_type": "yarn",
        "original_max_position_embeddings": 4,
        "rotary_scaling_factor": 4.0,
        "num_layers": 4,
        "no_rope_freq": "[0,0,1,0]",
        "window_size": (3, 0),
        "window_attn_skip_freq": "2",
        "rotary_base_local": 100.0,
        "document_ids": True,
    },
    "longrope, half of each head": SMALL
    | STILL
    | {
        "position_embedding_type": "longrope",
        "original_max_position_embeddings": 4,
        "rotary_scaling_factor": 4.0,
        "rotary_percent": 0.5,
        "longrope_short_factors": (1.0,) * 2,
        "longrope_long_factors": (2.0, 3.0),
    },
}
LATENT: dict[str, Any] = {name: value for name, value in (LLAMA | STILL).items() if "group" not in name}
LATENT |= {
    "multi_latent_attention": True,
    "kv_lora_rank": 10,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 5,
}
VARIANTS |= {
    "latent attention, yarn with a factor of scores, documents": LATENT
    | {
        "q_lora_rank": 14,
        "qk_layernorm": True,
        "add_qkv_bias": True,
        "position_embedding_type": "yarn",
        "original_max_position_embeddings": 4,
        "rotary_scaling_factor": 4.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "rotary_interleaved": True,
        "document_ids": True,
    },
    "latent attention without latent queries and norms, wide values, windows, sinks": LATENT
    | {"v_head_dim": 12, "window_size": (3, 0), "window_attn_skip_freq": "2", "softmax_type": "learnable"},
}
LATER: dict[str, Any] = {"family": "gpt, future tokens", "mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.7}
VARIANTS |= {
    "future tokens, documents": LLAMA | STILL | LATER | {"document_ids": True},
    "future tokens, tied, norms after, latent attention": LATENT
    | LATER
    | {"untie_embeddings_and_output_weights": False, "norm_placement": "both", "q_lora_rank": 14},
}
TWELVE_HEADS: dict[str, Any] = SMALL | STILL | {"hidden_size": 48, "num_attention_heads": 12}
THREES: dict[str, dict[str, Any]] = {
    "twelve heads": TWELVE_HEADS,
    "twelve heads, untied": TWELVE_HEADS | {"untie_embeddings_and_output_weights": True},
}
FEW_GROUPS: dict[str, dict[str, Any]] = {
    "one group": LLAMA | STILL | {"num_query_groups": 1, "add_qkv_bias": True},
    "two groups, qk norm, documents": LLAMA
    | STILL
    | {"num_query_groups": 2, "qk_layernorm": True, "document_ids": True, "untie_embeddings_and_output_weights": False},
    "two groups, qk norm over all heads": LLAMA
    | STILL
    | {"num_query_groups": 2, "qk_layernorm": True, "qk_layernorm_kind": "all_heads", "norm_placement": "after"},
    "one group, qk norm weights per head": LLAMA
    | STILL
    | {"num_query_groups": 1, "qk_layernorm": True, "qk_layernorm_kind": "per_head"},
}
DRAWING: dict[str, dict[str, Any]] = {
    "windows, sinks, dropout": LLAMA
    | {"attention_dropout": 0.2, "hidden_dropout": 0.2, "window_size": (3, 0), "softmax_type": "learnable"},
    "gpt2 with dropout": SMALL | {"attention_dropout": 0.2, "hidden_dropout": 0.2},
    "llama with dropout": LLAMA | {"attention_dropout": 0.2, "hidden_dropout": 0.2},
    "bert with dropout": BERT | {"attention_dropout": 0.2, "hidden_dropout": 0.2},
}

EVERY_VARIANT = VARIANTS | THREES | FEW_GROUPS | DRAWING

FULL, BLOCK = RecomputePlan("full"), RecomputePlan("full", "block", 1)
SELECTIVE = RecomputePlan("selective", modules=("core_attn", "layernorm"))
OFFLOADED = RecomputePlan(offloaded=9, least_offloaded=1)

HALVES: dict[str, Any] = {"micro_batch_size": 4}
"""Two microbatches, where one rank has four: gradients are added up, and ranks meet half as often."""

LAYOUTS: dict[str, Layout] = {
    "one rank, accumulation": Layout(micro_batch_size=1),
    "one rank, one microbatch": Layout(micro_batch_size=8),
    "one rank, recompute full": Layout(recompute=FULL),
    "one rank, recompute in runs of 2": Layout(recompute=RecomputePlan("full", "uniform", 2)),
    "one rank, recompute block": Layout(recompute=BLOCK),
    "one rank, recompute selective": Layout(recompute=SELECTIVE),
    "tp2": Layout(tp=2, **HALVES),
    "tp4": Layout(tp=4, **HALVES),
    "tp2 sp": Layout(tp=2, sequence_parallel=True, **HALVES),
    "tp4 sp": Layout(tp=4, sequence_parallel=True, **HALVES),
    "tp2 sp recompute full": Layout(tp=2, sequence_parallel=True, recompute=FULL, **HALVES),
    "tp2 recompute selective": Layout(tp=2, recompute=SELECTIVE, **HALVES),
    "tp2 sp offloaded": Layout(tp=2, sequence_parallel=True, recompute=OFFLOADED, **HALVES),
    "cp2 offloaded": Layout(cp=2, recompute=OFFLOADED, **HALVES),
    "dp2": Layout(dp=2),
    "dp4, fully masked rank": Layout(dp=4, micro_batch_size=1),
    "dp2 overlapped, small buckets": Layout(dp=2, overlap=True, bucket_size=1000),
    "dp2 zero": Layout(dp=2, sharded=True),
    "dp4 zero overlapped, small buckets": Layout(dp=4, sharded=True, overlap=True, bucket_size=1000),
    "tp2 dp2": Layout(tp=2, dp=2),
    "tp2 sp dp2 zero recompute": Layout(
        tp=2, dp=2, sequence_parallel=True, sharded=True, overlap=True, bucket_size=3000, recompute=FULL
    ),
    "one rank, accumulation fused": Layout(micro_batch_size=1, fuses_accumulation=True),
    "tp2 sp dp2 zero, accumulation fused": Layout(
        tp=2, dp=2, sequence_parallel=True, sharded=True, overlap=True, bucket_size=3000, fuses_accumulation=True
    ),
}
GATHER: tuple[CpCommType, ...] = ("all_gather",)
HEADS: tuple[CpCommType, ...] = ("a2a",)
LEVELS: dict[str, Any] = {"cp_comm_types": ("a2a+p2p",), "cp_sizes": (2, 2)}

LAYOUTS |= {
    "cp2": Layout(cp=2, **HALVES),
    "cp4": Layout(cp=4, **HALVES),
    "cp2 gather": Layout(cp=2, cp_comm_types=GATHER, **HALVES),
    "cp4 heads": Layout(cp=4, cp_comm_types=HEADS, **HALVES),
    "cp4 heads and rings": Layout(cp=4, **LEVELS, **HALVES),
    "cp2 another way in each layer": Layout(cp=2, cp_comm_types=("a2a", "p2p", "p2p", "a2a"), **HALVES),  # of 2 or 4
    "cp2 recompute full": Layout(cp=2, recompute=FULL, **HALVES),
    "cp2 heads, recompute selective": Layout(cp=2, cp_comm_types=HEADS, recompute=SELECTIVE, **HALVES),
    "cp2 recompute selective": Layout(cp=2, recompute=SELECTIVE, **HALVES),
    "cp2 tp2": Layout(cp=2, tp=2, **HALVES),
    "cp2 tp2 sp": Layout(cp=2, tp=2, sequence_parallel=True, **HALVES),
    "cp2 tp2 heads": Layout(cp=2, tp=2, cp_comm_types=HEADS, **HALVES),
    "cp2 dp2, fully masked ranks": Layout(cp=2, dp=2, micro_batch_size=1),
    "cp2 dp2 zero overlapped, small buckets": Layout(
        cp=2, dp=2, sharded=True, overlap=True, bucket_size=1000, cp_comm_types=GATHER
    ),
    "cp2 tp2 sp dp2 zero recompute": Layout(
        cp=2, tp=2, dp=2, sequence_parallel=True, sharded=True, overlap=True, bucket_size=3000, recompute=FULL
    ),
}
RICH = ("cp2 tp2 sp", "tp2 sp dp2 zero recompute", "cp2 tp2 heads")
"""Every variant is checked at one of them in the default tier."""
FEW_GROUPS_LAYOUTS = {
    "tp2": Layout(tp=2, **HALVES),
    "tp4": Layout(tp=4, **HALVES),
    "tp4 sp dp2 zero, small buckets": Layout(tp=4, dp=2, sequence_parallel=True, sharded=True, bucket_size=1000),
    "tp8 recompute": Layout(tp=8, recompute=FULL, **HALVES),
    "cp2 tp4": Layout(cp=2, tp=4, **HALVES),
    "cp2 tp4 heads": Layout(cp=2, tp=4, cp_comm_types=HEADS, **HALVES),
    "cp4 heads": Layout(cp=4, cp_comm_types=HEADS, **HALVES),
}
THREES_LAYOUTS = {
    "tp2": Layout(tp=2, **HALVES),
    "tp3": Layout(tp=3, **HALVES),
    "tp4": Layout(tp=4, **HALVES),
    "tp3 cp2": Layout(tp=3, cp=2, **HALVES),
}
"""Dropout on heads differs between tensor-parallel ranks, so only these layouts draw what one rank draws."""
SAME_DROPOUT = [
    name for name, layout in LAYOUTS.items() if layout.tp == layout.cp == 1 and layout.micro_batch_size == 2
]

"""Layouts that draw the same masks, those of the first: which keys a rank drops depends on how it meets them."""
SAME_DROPOUT_OVER_SLICES = {
    "p2p": [
        LAYOUTS["cp2"],
        LAYOUTS["cp2 recompute full"],
        LAYOUTS["cp2 recompute selective"],
        Layout(cp=2, dp=2, sharded=True),
    ],
    "heads": [
        Layout(cp=2, cp_comm_types=HEADS),
        LAYOUTS["cp2 heads, recompute selective"],
        Layout(cp=2, dp=2, cp_comm_types=HEADS, recompute=FULL),
    ],
    "gather": [LAYOUTS["cp2 gather"], Layout(cp=2, dp=2, cp_comm_types=GATHER, recompute=FULL)],
}


@functools.cache
def reference(variant: str) -> Observed:
    """Three steps on one rank."""
    return train(ParallelContext.single(dtype=torch.float64), EVERY_VARIANT[variant], Layout())


def ranks_of(variant: str, layout: Layout) -> list[Observed]:
    """Three steps at a layout, by rank."""
    return train_at(EVERY_VARIANT[variant], layout)


def train_at(settings: Mapping[str, Any], layout: Layout) -> list[Observed]:
    """Three steps of a model with these settings at a layout, by rank."""
    return run_ranks(
        train,
        settings,
        layout,
        tp=layout.tp,
        cp=layout.cp,
        dp=layout.dp,
        pp=layout.pp,
        ep=layout.ep,
        etp=layout.etp,
        pp_before_dp=layout.pp_before_dp,
        dtype=torch.float64,
        sequence_parallel=layout.sequence_parallel,
        reuse=True,
    )


def check(outcomes: list[Observed], expected: list[Observed]) -> None:
    """Compare what two layouts computed: initial weights bit for bit, everything else to the tolerance."""
    assert TOLERANCE <= 1e-9
    for each in compare(outcomes, expected):
        assert each.where is None, f"{each.kind} differ by up to {each.largest:.2e}, first in {each.where}"


@pytest.mark.parametrize(
    ("variant", "layout"),
    pairs(
        VARIANTS,
        LAYOUTS,
        rich=RICH,
        more={
            "llama": ("tp4", "cp2 tp2 sp dp2 zero recompute"),
            "alibi, windows, off by one": ("cp4 heads and rings",),
        },
    ),
)
def test_layout_computes_the_model_of_one_rank(variant: str, layout: str) -> None:
    """A wrong or missing collective anywhere would train another model at this layout."""
    check(ranks_of(variant, LAYOUTS[layout]), [reference(variant)])


HEADS_AGAIN = RecomputePlan("selective", modules=("mla_up_proj",))
LATENT_LAYOUTS = {
    "cp2 tp2 sp": Layout(cp=2, tp=2, sequence_parallel=True, **HALVES),
    "cp4": Layout(cp=4, **HALVES),
    "cp2 pp2 zb-h1 heads again": Layout(cp=2, pp=2, schedule="zb-h1", recompute=HEADS_AGAIN, **HALVES),
    "cp2 recompute heads and scores": Layout(
        cp=2, recompute=RecomputePlan("selective", modules=("mla_up_proj", "core_attn")), **HALVES
    ),
}


@pytest.mark.parametrize(
    ("variant", "layout"),
    [
        *(
            pytest.param(
                "latent attention, yarn with a factor of scores, documents",
                layout,
                marks=pytest.mark.slow if layout == "cp2 tp2 sp" else [],  # the next variant is there, too
            )
            for layout in LATENT_LAYOUTS
        ),
        ("latent attention without latent queries and norms, wide values, windows, sinks", "cp2 tp2 sp"),
    ],
)
def test_latents_on_a_ring_compute_the_model_of_one_rank(variant: str, layout: str) -> None:
    """Each rank makes keys and values of the latents that it gets; their weight's gradient comes from all of them."""
    check(ranks_of(variant, LATENT_LAYOUTS[layout]), [reference(variant)])


@pytest.mark.parametrize(
    ("variant", "layout"),
    pairs(
        FEW_GROUPS,
        FEW_GROUPS_LAYOUTS,
        rich=("tp4 sp dp2 zero, small buckets", "tp4", "cp2 tp4 heads", "cp2 tp4"),
    ),
)
def test_more_ranks_than_groups_compute_the_model_of_one_rank(variant: str, layout: str) -> None:
    """A shared key/value head whose gradient isn't summed, or is counted by each rank, trains another model."""
    check(ranks_of(variant, FEW_GROUPS_LAYOUTS[layout]), [reference(variant)])


@pytest.mark.parametrize(
    ("variant", "layout"),
    pairs(THREES, THREES_LAYOUTS, rich=("tp3 cp2", "tp3")),
)
def test_a_prime_vocabulary_divides_over_any_ranks(variant: str, layout: str) -> None:
    """Padding differs with the number of ranks; a word of it that got probability would change the loss."""
    check(ranks_of(variant, THREES_LAYOUTS[layout]), [reference(variant)])


@pytest.mark.parametrize(
    ("variant", "layout"),
    pairs(
        DRAWING,
        SAME_DROPOUT,
        rich=("one rank, recompute full", "dp2 zero"),
    ),
)
def test_dropout_is_a_function_of_sample_and_layer(variant: str, layout: str) -> None:
    """Recomputation would draw other masks than the forward pass, and data-parallel replicas the same ones."""
    check(ranks_of(variant, LAYOUTS[layout]), [reference(variant)])


@pytest.mark.parametrize(
    ("variant", "way"),
    pairs(DRAWING, SAME_DROPOUT_OVER_SLICES, rich=("gather", "p2p", "heads")),
)
def test_dropout_over_slices_is_replayed(variant: str, way: str) -> None:
    """Backward and recomputation would drop other probabilities than the forward pass, or replicas draw by rank."""
    layouts = [replace(layout, micro_batch_size=2) for layout in SAME_DROPOUT_OVER_SLICES[way]]
    first, *others = (ranks_of(variant, layout) for layout in layouts)
    for outcomes in others:
        check(outcomes, first)
