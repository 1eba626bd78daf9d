"""Mamba-2: layers of one kind, without attention; in transformers' files, and in those of its authors."""

from __future__ import annotations

from typing import Any

from megatron.config.hybrid_pattern import MAMBA
from megatron.config.mamba import MambaConfig
from megatron.config.model import ModelConfig
from megatron.core.conversion.bounds import Heads
from megatron.core.conversion.huggingface.config_reader import ConfigReader
from megatron.core.conversion.huggingface.format import ModelType
from megatron.core.conversion.tables import Row
from megatron.core.models.gpt.huggingface.hybrid_parts import (
    FIXED,
    expansion,
    mamba_kinds,
    mamba_part,
    mixer_rows,
    pattern_part,
    read_limits,
    written_limits,
)
from megatron.core.models.gpt.huggingface.state_spaces import as_transformers

_THEIRS = "backbone.layers.{n}"
_SETTINGS = {
    "mamba_state_dim": "state_size",
    "mamba_head_dim": "head_dim",
    "mamba_num_groups": "n_groups",
    "mamba_num_heads": "num_heads",
    "mamba_conv_kernel_dim": "conv_kernel",
}
# Fields of a model that only attention and networks have.
_WITHOUT_EFFECT = (
    *("num_attention_heads", "kv_channels", "num_query_groups", "group_query_attention", "ffn_hidden_size"),
    *("activation", "softmax_scale", "attn_logit_softcapping", "clip_qkv"),
)


def _read_mamba(reader: ConfigReader) -> dict[str, Any]:
    heads, width = reader("num_heads"), reader("hidden_size")
    if heads * reader("head_dim") != reader("expand") * width:
        advice = f"with head_dim = {reader('head_dim')} the heads are not expand * hidden_size wide"
        raise reader.refuse("num_heads", advice)
    return {"mamba_time_step_limits": read_limits(reader)}


def _write_mamba(mamba: MambaConfig, model: ModelConfig) -> dict[str, Any]:
    return {"expand": expansion(mamba, model), **written_limits(mamba)}


def _only_mamba(letters: str, model: ModelConfig) -> dict[str, Any]:
    return {"num_hidden_layers": letters.count(MAMBA)}


MAMBA2 = ModelType(
    architecture="Mamba2ForCausalLM",
    table=(
        Row("embedding.word_embeddings", "backbone.embeddings"),
        Row("decoder.final_layernorm", "backbone.norm_f"),
        Row("output_layer", "lm_head"),
    ),
    settings={
        "num_layers": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "vocab_size": "vocab_size",
        "norm_epsilon": "layer_norm_epsilon",
        "init_method_std": "initializer_range",
    },
    groups=(
        pattern_part(MAMBA, lambda reader: MAMBA * reader("num_hidden_layers"), _only_mamba),
        mamba_part(
            _SETTINGS, mixer_rows(f"{_THEIRS}.mixer", norm=f"{_THEIRS}.norm"), read=_read_mamba, write=_write_mamba
        ),
    ),
    by_code=_WITHOUT_EFFECT,
    fixed={
        **FIXED,
        "position_embedding_type": "none",
        "attention_dropout": 0.0,
        "max_position_embeddings": 1 << 20,  # there is no longest text
    },
    expected={"use_bias": False, "use_conv_bias": True, "hidden_act": "silu"},
    written={"use_bias": False, "use_conv_bias": True, "hidden_act": "silu"},
    defaults={
        "num_heads": 128,
        "head_dim": 64,
        "hidden_size": 4096,
        "state_size": 128,
        "num_hidden_layers": 64,
        "layer_norm_epsilon": 1e-5,
        "expand": 2,
        "conv_kernel": 4,
        "n_groups": 8,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
    },
    kinds={**mamba_kinds(_SETTINGS), "expand": Heads, **dict.fromkeys(("use_bias", "use_conv_bias"), bool)},
    read=lambda reader: {"num_attention_heads": 1, "ffn_hidden_size": reader("hidden_size")},
    idle=(
        *("chunk_size", "time_step_rank", "time_step_min", "time_step_max", "time_step_floor"),
        *("rescale_prenorm_residual", "residual_in_fp32"),
    ),
    prefix="backbone.",
    tied_copies=("lm_head.weight",),
    aliases={"backbone.embedding.weight": "backbone.embeddings.weight"},
    of_authors=as_transformers,
    about="Mamba-2 and Codestral Mamba, tied or not; also from the files of its authors (state-spaces)",
    example="mistralai/Mamba-Codestral-7B-v0.1",
)
TYPES = {"mamba2": MAMBA2}
