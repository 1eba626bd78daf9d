"""Llama, and the types with its names of tensors: Mistral, Qwen 2 and 3."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from megatron.config.model import LAYER_BIASES, ModelConfig
from megatron.core.conversion.huggingface import windows
from megatron.core.conversion.huggingface.biases import (
    BIAS_DEFAULTS,
    BIAS_FIELDS,
    attention_biases,
    biases,
    read_biases,
    uneven_biases,
    written_biases,
)
from megatron.core.conversion.huggingface.format import ModelType
from megatron.core.conversion.huggingface.known import Known
from megatron.core.conversion.huggingface.rotary import FIELDS, KINDS, read_rotary, written_rotary
from megatron.core.conversion.huggingface.windows import (
    read_layer_types,
    read_window,
    without_later_keys,
    written_layer_types,
    written_window,
)
from megatron.core.conversion.tables import Row
from megatron.core.conversion.transforms import PER_HEAD, QUERY_KEY_VALUE, stacked

OURS, THEIRS = "decoder.layers.{n}", "model.layers.{n}"


LLAMA = ModelType(
    architecture="LlamaForCausalLM",
    table=(
        Row("embedding.word_embeddings", "model.embed_tokens"),
        Row(f"{OURS}.input_layernorm", f"{THEIRS}.input_layernorm"),
        Row(
            f"{OURS}.self_attention.linear_qkv",
            tuple(f"{THEIRS}.self_attn.{letter}_proj" for letter in "qkv"),
            QUERY_KEY_VALUE,
        ),
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
        "num_layers": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "num_attention_heads": "num_attention_heads",
        "num_query_groups": "num_key_value_heads",
        "kv_channels": "head_dim",
        "ffn_hidden_size": "intermediate_size",
        "max_position_embeddings": "max_position_embeddings",
        "vocab_size": "vocab_size",
        "norm_epsilon": "rms_norm_eps",
        "attention_dropout": "attention_dropout",
        "init_method_std": "initializer_range",
    },
    optional=("num_key_value_heads", "head_dim"),
    activation="hidden_act",
    activations={"silu": "swiglu"},
    by_code=("group_query_attention", *BIAS_FIELDS, *FIELDS),
    fixed={"position_embedding_type": "rope", "normalization": "RMSNorm", "hidden_dropout": 0.0},
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "rope_theta": 10000.0,
        **BIAS_DEFAULTS,
    },
    kinds={**KINDS, **dict.fromkeys(BIAS_DEFAULTS, bool)},
    read=lambda known: {**read_biases(known), **read_rotary(known)},
    write=lambda model: {**written_biases(model), **written_rotary(model)},
    refuse=uneven_biases,
    unused=(".rotary_emb.inv_freq",),
    tied_copies=("lm_head.weight",),
    about=(
        "Llama 1 to 3.3 and SmolLM 2; biases in attention and MLP, each or none; linear, dynamic NTK, Llama 3, "
        "YaRN and LongRoPE scaling of rotary positions; tied or not"
    ),
    example="HuggingFaceTB/SmolLM2-135M",
)


def like_llama(
    architecture: str,
    *,
    about: str,
    example: str,
    defaults: Mapping[str, Any] = MappingProxyType({}),
    kinds: Mapping[str, Any] = MappingProxyType({}),
    by_code: Collection[str] = (),
    read: Callable[[Known], dict[str, Any]] = lambda known: {},
    write: Callable[[ModelConfig], dict[str, Any]] = lambda model: {},
    refuse: Callable[[ModelConfig], list[str]] = lambda model: [],
    written: Mapping[str, Any] = MappingProxyType({}),
    expected: Mapping[str, Any] = MappingProxyType({}),
    **fixed: Any,
) -> ModelType:
    """A type with Llama's names and no biases, and what it has besides: see ``ModelType``.

    ``read`` and ``write``: besides those of rotary positions. ``fixed``: fields in all these models.
    """
    return replace(
        LLAMA,
        architecture=architecture,
        defaults={**LLAMA.defaults, **defaults},
        kinds={**LLAMA.kinds, **kinds},
        by_code=(*LLAMA.by_code, *by_code),
        read=lambda known: {**read_rotary(known), **read(known)},
        write=lambda model: {**written_rotary(model), **write(model)},
        refuse=refuse,
        written=written,
        expected=expected,
        about=about,
        example=example,
        fixed={**LLAMA.fixed, **biases(qkv=False, output=False, mlp=False), **fixed},
    )


def with_attention_biases(each: ModelType) -> ModelType:
    """``each``, with biases in all linear layers of attention where ``attention_bias`` says so."""
    return replace(
        each,
        fixed={name: value for name, value in each.fixed.items() if name not in LAYER_BIASES or name == "add_mlp_bias"},
        read=lambda known: {**each.read(known), **attention_biases(known)},
        write=lambda model: {**each.write(model), "attention_bias": model.add_qkv_bias},
        refuse=lambda model: [*uneven_biases(model), *each.refuse(model)],
    )


def _qwen_windows(known: Known) -> dict[str, Any]:
    """Where a window is used, in the layers from ``max_window_layers`` on, unless ``layer_types`` says which."""
    by_number = bool(known.get("use_sliding_window")) and not known.get("layer_types")
    layers = range(known("num_hidden_layers"))
    return read_layer_types(known, usual=[by_number and layer >= known("max_window_layers") for layer in layers])


def qwen(architecture: str, *, defaults: Mapping[str, Any], **more: Any) -> ModelType:
    """A type of Qwen's, with windows in some layers."""
    return like_llama(
        architecture,
        defaults={"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28, **defaults},
        kinds=windows.KINDS,
        by_code=windows.FIELDS,
        read=_qwen_windows,
        write=lambda model: {"use_sliding_window": model.window_size is not None, **written_layer_types(model)},
        refuse=without_later_keys,
        **more,
    )


TYPES = {
    "llama": LLAMA,
    "mistral": like_llama(
        "MistralForCausalLM",
        defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        kinds=windows.KINDS,
        by_code=("window_size",),
        read=read_window,
        write=written_window,
        refuse=without_later_keys,
        about="Mistral, with a sliding window in all layers or none; rotary scaling as for llama",
        example="mistralai/Mistral-7B-v0.3",
    ),
    "qwen2": qwen(
        "Qwen2ForCausalLM",
        defaults={},
        add_qkv_bias=True,
        about="Qwen 1.5, 2 and 2.5, dense; sliding windows in any layers; rotary scaling as for llama; tied or not",
        example="Qwen/Qwen2.5-0.5B",
    ),
    "qwen3": with_attention_biases(
        qwen(
            "Qwen3ForCausalLM",
            about=(
                "Qwen 3, dense, with or without biases in attention; sliding windows in any layers; rotary scaling as "
                "for llama; tied or not"
            ),
            example="Qwen/Qwen3-0.6B",
            defaults={"head_dim": 128},
            qk_layernorm=True,
        )
    ),
}
