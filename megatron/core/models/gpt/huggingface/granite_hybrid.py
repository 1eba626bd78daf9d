"""Granite 4: Bamba's pairs of layers with Granite's multipliers, whose networks may be experts beside a shared one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import torch

from megatron.config.hybrid_pattern import ATTENTION, EXPERTS, MAMBA, MLP
from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig
from megatron.core.conversion.bounds import Width
from megatron.core.conversion.huggingface.biases import attention_biases
from megatron.core.conversion.huggingface.config_reader import ConfigReader
from megatron.core.conversion.huggingface.rotary import (
    ROTARY,
    neither_rotary_nor_none,
    read_rotary,
    written_rotary,
)
from megatron.core.conversion.tables import Row
from megatron.core.conversion.transforms import Transform
from megatron.core.models.gpt.huggingface.bamba import DEFAULTS, EXPECTED, IDLE, KINDS, MAMBA_PART, PAIR, written_mixers
from megatron.core.models.gpt.huggingface.experts import KINDS as EXPERT_KINDS
from megatron.core.models.gpt.huggingface.experts import with_experts
from megatron.core.models.gpt.huggingface.granite import GRANITE
from megatron.core.models.gpt.huggingface.hybrid_parts import (
    attention_rows,
    expert_layers_of,
    layer_types,
    pattern_part,
)
from megatron.core.models.gpt.huggingface.llama import OURS
from megatron.small_files import Between

_NAMES = {MAMBA: "mamba", ATTENTION: "attention"}  # which transformers 4 and 5 read
_POSITIONS = ("rope", "nope")
_PAIRS = Transform(
    lambda parts, model: torch.unflatten(parts[0], 1, (2, -1)),
    lambda tensor, model: [tensor.flatten(1, 2)],
)
"""Gates and values of each expert, one below the other."""


def _letters(reader: ConfigReader) -> str:
    layers = reader("num_hidden_layers")
    mixers = layer_types(reader, "layer_types") if reader.get("layer_types") else MAMBA * layers
    if len(mixers) != layers:
        raise reader.refuse("layer_types", f"it names {len(mixers)} layers, and num_hidden_layers is {layers}")
    network = EXPERTS if reader("num_local_experts") else MLP
    return "".join(f"{letter}{network}" for letter in mixers)


def _written_letters(letters: str, model: ModelConfig) -> dict[str, Any]:
    mixers = written_mixers(letters)
    return {"num_hidden_layers": len(mixers), "layer_types": [_NAMES.get(letter, letter) for letter in mixers]}


def _read_positions(reader: ConfigReader) -> dict[str, Any]:
    """Rotary positions where the settings ask for them, else none."""
    kind = reader.get("position_embedding_type")
    if kind not in (None, *_POSITIONS):
        raise reader.refuse("position_embedding_type", f"this project has {' and '.join(_POSITIONS)}")
    found = {"position_embedding_type": "rope", **read_rotary(reader)}
    return found if kind == "rope" else {**found, "position_embedding_type": "none"}


def _written_positions(model: ModelConfig) -> dict[str, Any]:
    return {**written_rotary(model), "position_embedding_type": "rope" if model.is_rotary else "nope"}


def _read_experts(reader: ConfigReader) -> dict[str, Any]:
    if not reader("num_local_experts"):
        reader.get("intermediate_size")  # which only experts have
        return {}
    if not reader("num_experts_per_tok"):
        raise reader.refuse("num_experts_per_tok", "with num_local_experts a token needs at least 1")
    return {
        "num_experts": reader("num_local_experts"),
        "moe_layer_freq": expert_layers_of(_letters(reader)),
        "moe_router_topk": reader("num_experts_per_tok"),
        "moe_ffn_hidden_size": reader("intermediate_size"),
        "moe_shared_expert_intermediate_size": reader("shared_intermediate_size"),
    }


def _written_experts(moe: MoEConfig, model: ModelConfig) -> dict[str, Any]:
    if not moe.has_experts:
        return {"num_local_experts": 0, "num_experts_per_tok": 0, "intermediate_size": model.ffn_hidden_size}
    return {
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.moe_router_topk,
        "intermediate_size": moe.moe_ffn_hidden_size,
        "shared_intermediate_size": moe.moe_shared_expert_intermediate_size or 1,
    }


def _expert_rows(moe: MoEConfig) -> Sequence[Row]:
    own, theirs = f"{OURS}.mlp", f"{PAIR}.block_sparse_moe"
    return (
        Row(f"{own}.router", f"{theirs}.router.layer"),
        Row(f"{own}.experts.linear_fc1", f"{theirs}.input_linear", _PAIRS),
        Row(f"{own}.experts.linear_fc2", f"{theirs}.output_linear"),
        Row(f"{own}.shared_experts.linear_fc1", f"{PAIR}.shared_mlp.input_linear"),
        Row(f"{own}.shared_experts.linear_fc2", f"{PAIR}.shared_mlp.output_linear"),
    )


GRANITE_HYBRID = with_experts(
    replace(
        GRANITE,
        architecture="GraniteMoeHybridForCausalLM",
        table=(
            Row("embedding.word_embeddings", "model.embed_tokens"),
            *attention_rows(f"{PAIR}.self_attn", norm=f"{PAIR}.input_layernorm"),
            Row(f"{OURS}.pre_mlp_layernorm", f"{PAIR}.post_attention_layernorm"),
            Row(f"{OURS}.mlp.linear_fc1", f"{PAIR}.shared_mlp.input_linear"),
            Row(f"{OURS}.mlp.linear_fc2", f"{PAIR}.shared_mlp.output_linear"),
            Row("decoder.final_layernorm", "model.norm"),
            Row("output_layer", "lm_head"),
        ),
        settings={
            **{name: theirs for name, theirs in GRANITE.settings.items() if name != "num_layers"},
            "ffn_hidden_size": "shared_intermediate_size",
        },
        features=(
            replace(ROTARY, read=_read_positions, write=_written_positions, refuse=neither_rotary_nor_none),
            attention_biases(),
        ),
        groups=(pattern_part(MAMBA + ATTENTION + MLP + EXPERTS, _letters, _written_letters), MAMBA_PART),
        by_code=(*GRANITE.by_code, "num_layers"),
        fixed={name: value for name, value in GRANITE.fixed.items() if name != "position_embedding_type"},
        expected=EXPECTED,
        written=EXPECTED,
        defaults={
            **GRANITE.defaults,
            **DEFAULTS,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 1024,
            "intermediate_size": 11008,
        },
        kinds={
            **GRANITE.kinds,
            **EXPERT_KINDS,
            **KINDS,
            **dict.fromkeys(("num_local_experts", "num_experts_per_tok"), Annotated[int, Between(0, 4096)]),
            "intermediate_size": Width,
            "layer_types": list[str],
            "position_embedding_type": str,
        },
        idle=IDLE,
        older_settings={"layers_block_type": "layer_types"},
        read=lambda reader: {**GRANITE.read(reader), "num_layers": 2 * reader("num_hidden_layers")},
        about="Granite 4 with and without Mamba-2 layers, dense or with experts; rotary positions or none; tied or not",
        example="ibm-granite/granite-4.0-h-micro",
    ),
    read=_read_experts,
    write=_written_experts,
    rows=_expert_rows,
    optional=True,
)
TYPES = {"granitemoehybrid": GRANITE_HYBRID}
