"""Bamba: pairs of a mixer, Mamba-2 or attention, and an MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.config.hybrid_pattern import ATTENTION, MAMBA, MLP
from megatron.config.mamba import MambaConfig
from megatron.config.model import ModelConfig
from megatron.core.conversion.bounds import Heads, Layers
from megatron.core.conversion.huggingface.biases import BIASES
from megatron.core.conversion.huggingface.config_reader import ConfigReader
from megatron.core.conversion.huggingface.rotary import partial_rotary, read_rotary, written_rotary
from megatron.core.conversion.tables import Row
from megatron.core.conversion.transforms import stacked
from megatron.core.models.gpt.huggingface.hybrid_parts import (
    attention_rows,
    expansion,
    mamba_kinds,
    mamba_part,
    mixer_rows,
    pattern_part,
    read_limits,
    written_limits,
)
from megatron.core.models.gpt.huggingface.llama import LLAMA, OURS

PAIR = "model.layers.{pair}"
"""The published layer that two of ours make, a mixer and a network."""

SETTINGS = {
    "mamba_state_dim": "mamba_d_state",
    "mamba_num_groups": "mamba_n_groups",
    "mamba_num_heads": "mamba_n_heads",
    "mamba_conv_kernel_dim": "mamba_d_conv",
}
EXPECTED: dict[str, Any] = {"mamba_proj_bias": False, "mamba_conv_bias": True}
DEFAULTS: dict[str, Any] = {
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
KINDS: dict[str, Any] = {
    **mamba_kinds(SETTINGS),
    "num_hidden_layers": Layers,
    "mamba_d_head": int | str,
    "mamba_expand": Heads,
    **dict.fromkeys(EXPECTED, bool),
}
IDLE = ("mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient")
"""Settings on which what a model computes doesn't depend."""
_PERCENT = 0.5


def _read_mamba(reader: ConfigReader) -> dict[str, Any]:
    """Width of heads and limits of steps; CheckpointError for heads that don't fill the width."""
    heads, width = reader("mamba_n_heads"), reader("mamba_expand") * reader("hidden_size")
    head = reader("mamba_d_head")
    head = width // heads if head == "auto" else head
    if not isinstance(head, int) or head * heads != width:
        advice = f"{heads} heads (mamba_n_heads) are mamba_expand * hidden_size = {width} wide"
        raise reader.refuse("mamba_d_head", advice)
    return {"mamba_head_dim": head, "mamba_time_step_limits": read_limits(reader)}


def _written_mamba(mamba: MambaConfig, model: ModelConfig) -> dict[str, Any]:
    return {"mamba_d_head": mamba.mamba_head_dim, "mamba_expand": expansion(mamba, model), **written_limits(mamba)}


MAMBA_PART = mamba_part(
    SETTINGS,
    mixer_rows(f"{PAIR}.mamba", norm=f"{PAIR}.input_layernorm"),
    read=_read_mamba,
    write=_written_mamba,
)
"""Mamba-2 layers with the settings and names of Bamba."""


def _letters(reader: ConfigReader) -> str:
    attention, layers = reader.get("attn_layer_indices") or (), range(reader("num_hidden_layers"))
    if not {*attention} <= {*layers}:
        raise reader.refuse("attn_layer_indices", f"there are {len(layers)} layers, counted from 0")
    return "".join(f"{ATTENTION if layer in attention else MAMBA}{MLP}" for layer in layers)


def written_mixers(letters: str) -> str:
    """The mixer of each pair."""
    return letters[::2]


def _written_letters(letters: str, model: ModelConfig) -> dict[str, Any]:
    mixers = written_mixers(letters)
    attention = [number for number, letter in enumerate(mixers) if letter == ATTENTION]
    return {"num_hidden_layers": len(mixers), "attn_layer_indices": attention or None}


def _read_rotary(reader: ConfigReader) -> dict[str, Any]:
    """transformers turns half of each head, unless ``rope_parameters`` says otherwise."""
    return read_rotary(reader.but(partial_rotary_factor=_PERCENT), partial=True)


def _written_rotary(model: ModelConfig) -> dict[str, Any]:
    """The settings that transformers 4 reads, too, where half of each head is turned."""
    found = written_rotary(model)
    if model.rotary_percent == _PERCENT:
        return found
    scaling = found.pop("rope_scaling") or {"rope_type": "default"}
    rope = {**scaling, "rope_theta": model.rotary_base, "partial_rotary_factor": model.rotary_percent}
    return {**found, "rope_parameters": rope}


_ROTARY = replace(partial_rotary(), read=_read_rotary, write=_written_rotary)
BAMBA = replace(
    LLAMA,
    architecture="BambaForCausalLM",
    table=(
        Row("embedding.word_embeddings", "model.embed_tokens"),
        *attention_rows(f"{PAIR}.self_attn", norm=f"{PAIR}.input_layernorm"),
        Row(f"{OURS}.pre_mlp_layernorm", f"{PAIR}.pre_ff_layernorm"),
        Row(
            f"{OURS}.mlp.linear_fc1",
            (f"{PAIR}.feed_forward.gate_proj", f"{PAIR}.feed_forward.up_proj"),
            stacked(2),
        ),
        Row(f"{OURS}.mlp.linear_fc2", f"{PAIR}.feed_forward.down_proj"),
        Row("decoder.final_layernorm", "model.final_layernorm"),
        Row("output_layer", "lm_head"),
    ),
    settings={name: theirs for name, theirs in LLAMA.settings.items() if name != "num_layers"},
    features=(_ROTARY, BIASES),
    groups=(pattern_part(MAMBA + ATTENTION + MLP, _letters, _written_letters), MAMBA_PART),
    by_code=("num_layers",),
    expected=EXPECTED,
    written=EXPECTED,
    defaults={
        **LLAMA.defaults,
        **DEFAULTS,
        "max_position_embeddings": 262144,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
    },
    kinds={**KINDS, "attn_layer_indices": list[int]},
    idle=IDLE,
    read=lambda reader: {"num_layers": 2 * reader("num_hidden_layers")},
    about="Bamba 9B; biases in attention and MLP, each or none; rotary scaling as for llama; tied or not",
    example="ibm-ai-platform/Bamba-9B-v1",
)
TYPES = {"bamba": BAMBA}
