"""Llama, and the types with its names of tensors: Mistral, Qwen 2 and 3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron.core.conversion.huggingface.biases import BIASES, NO_BIASES, attention_biases
from megatron.core.conversion.huggingface.config_reader import ConfigReader, Feature
from megatron.core.conversion.huggingface.format import USUAL_SETTINGS, ModelType
from megatron.core.conversion.huggingface.rotary import ROTARY
from megatron.core.conversion.huggingface.windows import WINDOW, is_used, windows_where, written_on_request
from megatron.core.conversion.tables import Row
from megatron.core.conversion.transforms import PER_HEAD, QUERY_KEY_VALUE, stacked

OURS, THEIRS = "decoder.layers.{n}", "model.layers.{n}"
QKV = tuple(f"{THEIRS}.self_attn.{letter}_proj" for letter in "qkv")


LLAMA = ModelType(
    architecture="LlamaForCausalLM",
    table=(
        Row("embedding.word_embeddings", "model.embed_tokens"),
        Row(f"{OURS}.input_layernorm", f"{THEIRS}.input_layernorm"),
        Row(f"{OURS}.self_attention.linear_qkv", QKV, QUERY_KEY_VALUE),
        Row(f"{OURS}.self_attention.q_layernorm", f"{THEIRS}.self_attn.q_norm", PER_HEAD),
        Row(f"{OURS}.self_attention.k_layernorm", f"{THEIRS}.self_attn.k_norm", PER_HEAD),
        Row(f"{OURS}.self_attention.linear_proj", f"{THEIRS}.self_attn.o_proj"),
        Row(f"{OURS}.pre_mlp_layernorm", f"{THEIRS}.post_attention_layernorm"),
        Row(f"{OURS}.mlp.linear_fc1", (f"{THEIRS}.mlp.gate_proj", f"{THEIRS}.mlp.up_proj"), stacked(2)),
        Row(f"{OURS}.mlp.linear_fc2", f"{THEIRS}.mlp.down_proj"),
        Row("decoder.final_layernorm", "model.norm"),
        Row("output_layer", "lm_head"),
    ),
    settings={
        **USUAL_SETTINGS,
        "num_query_groups": "num_key_value_heads",
        "kv_channels": "head_dim",
        "norm_epsilon": "rms_norm_eps",
    },
    optional=("num_key_value_heads", "head_dim"),
    activation="hidden_act",
    activations={"silu": "swiglu"},
    features=(ROTARY, BIASES),
    fixed={"position_embedding_type": "rope", "normalization": "RMSNorm", "hidden_dropout": 0.0},
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
    },
    unused=(".rotary_emb.inv_freq",),
    tied_copies=("lm_head.weight",),
    about=(
        "Llama 1 to 3.3 and SmolLM 2; biases in attention and MLP, each or none; linear, dynamic NTK, Llama 3, "
        "YaRN and LongRoPE scaling of rotary positions; tied or not"
    ),
    example="HuggingFaceTB/SmolLM2-135M",
)


def _qwen_windows(reader: ConfigReader) -> list[bool]:
    """Where a window is used, in the layers from ``max_window_layers`` on, unless ``layer_types`` says which."""
    by_number = is_used(reader) and not reader.get("layer_types")
    first = reader("max_window_layers") if by_number else reader.get("max_window_layers")
    return [by_number and layer >= first for layer in range(reader("num_hidden_layers"))]


QWEN_WINDOWS = windows_where(_qwen_windows, write=written_on_request, sliding_window=4096, max_window_layers=28)


def like_llama(
    architecture: str, *features: Feature, defaults: Mapping[str, Any], about: str, example: str, **fixed: Any
) -> ModelType:
    """A type with Llama's names of tensors and settings. ``fixed``: fields in all these models."""
    return replace(
        LLAMA,
        architecture=architecture,
        features=(ROTARY, *features),
        defaults={**LLAMA.defaults, **defaults},
        fixed={**LLAMA.fixed, **fixed},
        about=about,
        example=example,
    )


TYPES = {
    "llama": LLAMA,
    "mistral": like_llama(
        "MistralForCausalLM",
        NO_BIASES,
        WINDOW,
        defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        about="Mistral, with a sliding window in all layers or none; rotary scaling as for llama",
        example="mistralai/Mistral-7B-v0.3",
    ),
    "qwen2": like_llama(
        "Qwen2ForCausalLM",
        NO_BIASES,
        QWEN_WINDOWS,
        defaults={"max_position_embeddings": 32768, "num_key_value_heads": 32},
        add_qkv_bias=True,
        about="Qwen 1.5, 2 and 2.5, dense; sliding windows in any layers; rotary scaling as for llama; tied or not",
        example="Qwen/Qwen2.5-0.5B",
    ),
    "qwen3": like_llama(
        "Qwen3ForCausalLM",
        attention_biases(),
        QWEN_WINDOWS,
        defaults={"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
        qk_layernorm=True,
        about=(
            "Qwen 3, dense, with or without biases in attention; sliding windows in any layers; rotary scaling as for "
            "llama; tied or not"
        ),
        example="Qwen/Qwen3-0.6B",
    ),
}
