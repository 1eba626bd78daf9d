"""Mixtral, and the types with a router of softmax scores and ordinary attention: Qwen 2 and 3 MoE, OLMoE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig
from megatron.core.conversion.bounds import Factor
from megatron.core.conversion.huggingface.biases import NO_BIASES, attention_biases, query_biases
from megatron.core.conversion.huggingface.config_reader import ConfigReader
from megatron.core.conversion.huggingface.windows import (
    WINDOW,
    every_second,
    is_used,
    read_window,
    windows_where,
    written_on_request,
    written_window,
)
from megatron.core.conversion.tables import Row
from megatron.core.models.gpt.huggingface.experts import (
    KINDS,
    expert_layers,
    expert_rows,
    shared_rows,
    with_experts,
)
from megatron.core.models.gpt.huggingface.llama import LLAMA, OURS, THEIRS, like_llama
from megatron.small_files import Between

MIXTRAL = with_experts(
    replace(
        like_llama(
            "MixtralForCausalLM",
            NO_BIASES,
            WINDOW,
            defaults={
                "max_position_embeddings": 131072,
                "num_key_value_heads": 8,
                "rms_norm_eps": 1e-5,
                "rope_theta": 1000000.0,
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
            },
            about="Mixtral 8x7B and 8x22B, with a sliding window in all layers or none",
            example="mistralai/Mixtral-8x7B-v0.1",
        ),
        kinds={**KINDS, "router_jitter_noise": float},
        expected={"router_jitter_noise": 0.0},
    ),
    read=lambda reader: {
        "num_experts": reader("num_local_experts"),
        "moe_router_topk": reader("num_experts_per_tok"),
        "moe_ffn_hidden_size": reader("intermediate_size"),
    },
    write=lambda moe, model: {
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.moe_router_topk,
        "intermediate_size": moe.moe_ffn_hidden_size,
    },
    rows=lambda moe: expert_rows(moe, OURS, f"{THEIRS}.block_sparse_moe", names=("w1", "w3", "w2")),
)


def _sparse_layers(reader: ConfigReader) -> list[bool]:
    dense, step = reader.get("mlp_only_layers") or (), reader("decoder_sparse_step")
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(reader("num_hidden_layers"))]


def _softmax_experts(reader: ConfigReader, *, count: str, width: str) -> dict[str, Any]:
    return {
        "num_experts": reader(count),
        "moe_router_topk": reader("num_experts_per_tok"),
        "moe_ffn_hidden_size": reader(width),
        "moe_router_pre_softmax": not reader("norm_topk_prob"),
    }


def _written_softmax(moe: MoEConfig, *, width: str) -> dict[str, Any]:
    return {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.moe_router_topk,
        width: moe.moe_ffn_hidden_size,
        "norm_topk_prob": not moe.moe_router_pre_softmax,
    }


def _written_sparse(moe: MoEConfig, model: ModelConfig) -> dict[str, Any]:
    marked = moe.expert_layers(model.num_layers)
    layers = {"decoder_sparse_step": 1, "mlp_only_layers": [number for number, each in enumerate(marked) if not each]}
    return {**_written_softmax(moe, width="moe_intermediate_size"), **layers}


def _qwen2_experts(reader: ConfigReader) -> dict[str, Any]:
    return {
        **_softmax_experts(reader, count="num_experts", width="moe_intermediate_size"),
        "moe_layer_freq": expert_layers(_sparse_layers(reader)),
        "moe_shared_expert_intermediate_size": reader("shared_expert_intermediate_size"),
        "moe_shared_expert_gate": True,
    }


def _written_qwen2(moe: MoEConfig, model: ModelConfig) -> dict[str, Any]:
    shared = moe.moe_shared_expert_intermediate_size
    return {**_written_sparse(moe, model), "shared_expert_intermediate_size": shared or 1}


def _qwen2_rows(moe: MoEConfig) -> Sequence[Row]:
    theirs = f"{THEIRS}.mlp"
    gate = Row(f"{OURS}.mlp.shared_experts.gate", f"{theirs}.shared_expert_gate")
    return (*expert_rows(moe, OURS, theirs), *shared_rows(OURS, f"{theirs}.shared_expert"), gate)


def _windows_of_qwen2(reader: ConfigReader) -> list[bool]:
    """Where a window is used, every second layer below ``max_window_layers``, and not those above as in other Qwens."""
    by_number = is_used(reader) and not reader.get("layer_types")
    last = reader("max_window_layers") if by_number else reader.get("max_window_layers")
    return [by_number and each and n < last for n, each in enumerate(every_second(reader))]


_SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": False}
QWEN2_MOE = with_experts(
    replace(
        like_llama(
            "Qwen2MoeForCausalLM",
            query_biases("qkv_bias", default=True),
            windows_where(_windows_of_qwen2, write=written_on_request, sliding_window=4096, max_window_layers=28),
            defaults={
                "max_position_embeddings": 32768,
                "num_key_value_heads": 16,
                "num_experts": 60,
                "num_experts_per_tok": 4,
                "moe_intermediate_size": 1408,
                "shared_expert_intermediate_size": 5632,
                **_SPARSE,
            },
            about="Qwen 1.5 and 2 with experts; any layers dense; sliding windows in any layers",
            example="Qwen/Qwen1.5-MoE-A2.7B",
        ),
        kinds={**KINDS, "sliding_window": Annotated[int, Between(0, 1 << 31)]},
    ),
    read=_qwen2_experts,
    write=_written_qwen2,
    rows=_qwen2_rows,
)


def _qwen3_experts(reader: ConfigReader) -> dict[str, Any]:
    return {
        **_softmax_experts(reader, count="num_local_experts", width="moe_intermediate_size"),
        "moe_layer_freq": expert_layers(_sparse_layers(reader)),
    }


_WINDOW_ON_REQUEST = replace(
    WINDOW,
    read=lambda reader: read_window(reader if reader.get("use_sliding_window") else reader.but(sliding_window=None)),
    write=lambda model: {"use_sliding_window": model.window_size is not None, **written_window(model)},
)
QWEN3_MOE = with_experts(
    replace(
        like_llama(
            "Qwen3MoeForCausalLM",
            attention_biases(),
            _WINDOW_ON_REQUEST,
            defaults={
                "max_position_embeddings": 32768,
                "num_key_value_heads": 4,
                "sliding_window": 4096,
                "num_local_experts": 128,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 768,
                **_SPARSE,
            },
            about=(
                "Qwen 3 with experts, with or without biases in attention; any layers dense; a sliding window in all "
                "layers or none"
            ),
            example="Qwen/Qwen3-30B-A3B",
            qk_layernorm=True,
        ),
        kinds=KINDS,
        older_settings={"num_experts": "num_local_experts"},
    ),
    read=_qwen3_experts,
    write=lambda moe, model: {**_written_sparse(moe, model), "num_local_experts": moe.num_experts},
    rows=lambda moe: expert_rows(moe, OURS, f"{THEIRS}.mlp"),
)

OLMOE = with_experts(
    replace(
        like_llama(
            "OlmoeForCausalLM",
            NO_BIASES,
            defaults={
                "max_position_embeddings": 4096,
                "rms_norm_eps": 1e-5,
                "num_experts": 64,
                "num_experts_per_tok": 8,
                "norm_topk_prob": False,
            },
            about="OLMoE",
            example="allenai/OLMoE-1B-7B-0924",
            qk_layernorm=True,
            qk_layernorm_kind="all_heads",
        ),
        settings={name: theirs for name, theirs in LLAMA.settings.items() if name != "kv_channels"},
        kinds={**KINDS, "attention_bias": bool, "clip_qkv": Factor},
        expected={"attention_bias": False, "clip_qkv": None},
        written={"attention_bias": False, "clip_qkv": None},
    ),
    read=lambda reader: _softmax_experts(reader, count="num_experts", width="intermediate_size"),
    write=lambda moe, model: _written_softmax(moe, width="intermediate_size"),
    rows=lambda moe: expert_rows(moe, OURS, f"{THEIRS}.mlp"),
)

TYPES = {"mixtral": MIXTRAL, "qwen2_moe": QWEN2_MOE, "qwen3_moe": QWEN3_MOE, "olmoe": OLMOE}
