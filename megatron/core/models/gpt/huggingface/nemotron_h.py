"""Nemotron-H: a letter for each layer, Mamba-2, attention without positions, MLP or experts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import torch

from megatron.config.hybrid import HybridConfig
from megatron.config.hybrid_pattern import ATTENTION, EXPERTS, LETTERS, MAMBA, MLP
from megatron.config.mamba import MambaConfig
from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig
from megatron.core.conversion.bounds import Factor, Width
from megatron.core.conversion.huggingface.config_reader import UNGATED, ConfigReader, Feature
from megatron.core.conversion.huggingface.format import USUAL_SETTINGS, ModelType
from megatron.core.conversion.tables import Row
from megatron.core.conversion.transforms import Transform
from megatron.core.models.gpt.huggingface.deepseek import biased_choice, mtp_layer, written_choice
from megatron.core.models.gpt.huggingface.experts import KINDS, STACKED, with_experts
from megatron.core.models.gpt.huggingface.hybrid_parts import (
    FIXED,
    attention_rows,
    expert_layers_of,
    layer_types,
    limits,
    mamba_kinds,
    mamba_part,
    mixer_rows,
    pattern_part,
    read_limits,
)
from megatron.core.models.gpt.huggingface.llama import OURS
from megatron.small_files import Between

_DEPTHS = "num_nextn_predict_layers"
_THEIRS = "backbone.layers.{n}"
_NORM, _MIXER = f"{_THEIRS}.norm", f"{_THEIRS}.mixer"
_SETTINGS = {
    "mamba_state_dim": "ssm_state_size",
    "mamba_head_dim": "mamba_head_dim",
    "mamba_num_groups": "n_groups",
    "mamba_num_heads": "mamba_num_heads",
    "mamba_conv_kernel_dim": "conv_kernel",
}
_KINDS_OF_LAYERS = {
    "linear_attention": MAMBA,
    "full_attention": ATTENTION,
    "mlp": MLP,
    "moe": EXPERTS,
    "mamba": MAMBA,
    "attention": ATTENTION,  # earlier names
}
_OLDER = {
    "layer_types": "layers_block_type",
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_min": "time_step_min",
    "mamba_conv_bias": "use_conv_bias",
    "num_local_experts": "n_routed_experts",
}
_MATRICES = Transform(
    lambda parts, model: torch.stack(list(parts)).unsqueeze(1),
    lambda tensor, model: [part.contiguous() for part in tensor[:, 0].unbind()],
)


def _letters(reader: ConfigReader, *, of_depth: str = "") -> str:
    """The letters of the layers, or with ``of_depth`` mtp_ of a depth of multi-token prediction."""
    types, letters = f"{of_depth}layers_block_type", f"{of_depth}hybrid_override_pattern"
    pattern = reader.get(letters)
    if reader.get(types) or pattern is None:
        return layer_types(reader, types, _KINDS_OF_LAYERS)
    if not pattern or not {*pattern} <= {*_KINDS_OF_LAYERS.values()}:
        kinds = ", ".join(f"{letter} {LETTERS[letter]}" for letter in (MAMBA, ATTENTION, MLP, EXPERTS))
        raise reader.refuse(letters, f"its letters are {kinds}")
    return str(pattern)


def _whole_pattern(reader: ConfigReader) -> str:
    depths = reader.get(_DEPTHS) or 0
    return "/".join((_letters(reader), *([_letters(reader, of_depth="mtp_")] * depths if depths else ())))


def _written_letters(hybrid: HybridConfig, model: ModelConfig) -> dict[str, Any]:
    """The lists of transformers 5, and the letters that the model's own code reads."""
    names = {letter: name for name, letter in [*_KINDS_OF_LAYERS.items()][:4]}
    found: dict[str, Any] = {"num_hidden_layers": len(hybrid.letters), _DEPTHS: model.mtp_num_layers}
    for before, letters in {"": hybrid.letters, "mtp_": hybrid.depth_letters}.items():
        if letters:
            found[f"{before}layers_block_type"] = [names.get(letter, letter) for letter in letters]
            found[f"{before}hybrid_override_pattern"] = letters
    return found


def _later_rows(rows: Sequence[Row], model: ModelConfig, groups: Sequence[object]) -> Sequence[Row]:
    """Each layer of a depth of multi-token prediction is one of theirs, with what stands around a depth in its first
    and last.
    """
    size = len(HybridConfig.among(groups).depth_letters)
    found = list[Row]()
    for depth in range(model.mtp_num_layers):
        first, last = depth * size, (depth + 1) * size - 1
        for number in range(size):
            own = f"mtp.layers.{depth}.{f'layers.{number}' if size > 1 else 'transformer_layer'}"
            found += mtp_layer(rows, ours=own, before=_THEIRS, theirs=f"mtp.layers.{first + number}")
        around = {"enorm": first, "hnorm": first, "eh_proj": first, "final_layernorm": last}
        found += (Row(f"mtp.layers.{depth}.{name}", f"mtp.layers.{at}.{name}") for name, at in around.items())
    return found


def _read_mamba(reader: ConfigReader) -> dict[str, Any]:
    """transformers clamps steps to ``time_step_min``, whatever ``time_step_limit`` says. Raises CheckpointError for a
    limit that is another one, with which programs that obey it compute another model.
    """
    least, (lowest, highest) = reader("time_step_min"), read_limits(reader) or (0.0, math.inf)
    if lowest > least or limits(0.0, highest) is not None:
        raise reader.refuse(
            "time_step_limit",
            f"transformers ignores it and only limits steps to time_step_min ({least:g}) or more, and other programs "
            "obey it; write [0.0, Infinity] there if the model was trained without it",
        )
    return {"mamba_time_step_limits": limits(least, math.inf)}


def _written_mamba(mamba: MambaConfig, model: ModelConfig) -> dict[str, Any]:
    lowest, _ = mamba.mamba_time_step_limits or (0.0, 0.0)
    return {"time_step_min": lowest, "expand": max(mamba.inner_size(model) // model.hidden_size, 1)}


def _read_experts(reader: ConfigReader) -> dict[str, Any]:
    letters, factor = _letters(reader), reader("routed_scaling_factor")
    if EXPERTS not in letters:
        for name in _OF_EXPERTS:
            reader.get(name)  # dense models have these, too
        return {}
    if reader("mlp_bias"):
        raise reader.refuse(
            "mlp_bias", "shared experts have biases and routed ones none, and here both have or neither"
        )
    return {
        "num_experts": reader("n_routed_experts"),
        "moe_layer_freq": expert_layers_of(letters),
        "moe_ffn_hidden_size": reader("moe_intermediate_size"),
        "moe_shared_expert_intermediate_size": reader("moe_shared_expert_intermediate_size"),
        "moe_router_topk": reader("num_experts_per_tok"),
        "moe_router_topk_scaling_factor": None if factor == 1.0 else float(factor),
        **biased_choice(reader),
    }


def _written_experts(moe: MoEConfig, model: ModelConfig) -> dict[str, Any]:
    if not moe.has_experts:
        return {}
    return {
        "n_routed_experts": moe.num_experts,
        "moe_intermediate_size": moe.moe_ffn_hidden_size,
        "moe_shared_expert_intermediate_size": moe.moe_shared_expert_intermediate_size or 1,
        "n_shared_experts": 1,
        "num_experts_per_tok": moe.moe_router_topk,
        "routed_scaling_factor": moe.moe_router_topk_scaling_factor or 1.0,
        "mlp_bias": model.add_mlp_bias,
        **written_choice(moe),
    }


def _expert_rows(moe: MoEConfig) -> Sequence[Row]:
    own, each = f"{OURS}.mlp", [f"{_MIXER}.experts.{number}" for number in range(moe.num_experts or 0)]
    return (
        Row(f"{own}.router", f"{_MIXER}.gate"),
        Row(f"{own}.router.expert_bias", f"{_MIXER}.gate.e_score_correction_bias", is_parameter=True),
        Row(f"{own}.experts.linear_fc1", tuple(f"{one}.up_proj" for one in each), _MATRICES),
        Row(f"{own}.experts.linear_fc2", tuple(f"{one}.down_proj" for one in each), STACKED),
        Row(f"{own}.shared_experts.linear_fc1", f"{_MIXER}.shared_experts.up_proj"),
        Row(f"{own}.shared_experts.linear_fc2", f"{_MIXER}.shared_experts.down_proj"),
    )


_MLP_BIASES = Feature(
    by_code=("add_mlp_bias",),
    defaults={"mlp_bias": False},
    kinds={"mlp_bias": bool},
    read=lambda reader: {"add_mlp_bias": reader("mlp_bias")},
    write=lambda model: {"mlp_bias": model.add_mlp_bias},
)
_EXPECTED: dict[str, Any] = {
    "tie_word_embeddings": False,  # transformers' class ties nothing
    "use_bias": False,
    "use_conv_bias": True,
    "mamba_proj_bias": False,
    "mamba_hidden_act": "silu",
    "attention_bias": False,
    "sliding_window": None,
    "moe_latent_size": None,
}
_IDLE = (
    *("chunk_size", "expand", "time_step_max", "time_step_floor", "rescale_prenorm_residual"),
    *("residual_in_fp32", "num_logits_to_keep", "use_mamba_kernels", "mamba_ssm_cache_dtype", "n_shared_experts"),
    *("moe_shared_expert_overlap", "mtp_layers_block_type", "mtp_hybrid_override_pattern", "num_hidden_layers"),
)
_OF_EXPERTS = (
    *("n_routed_experts", "moe_intermediate_size", "moe_shared_expert_intermediate_size", "num_experts_per_tok"),
    *("n_group", "topk_group", "norm_topk_prob"),
)
NEMOTRON_H = with_experts(
    ModelType(
        architecture="NemotronHForCausalLM",
        table=(
            Row("embedding.word_embeddings", "backbone.embeddings"),
            *attention_rows(_MIXER, norm=_NORM),
            Row(f"{OURS}.pre_mlp_layernorm", _NORM),
            Row(f"{OURS}.mlp.linear_fc1", f"{_MIXER}.up_proj"),
            Row(f"{OURS}.mlp.linear_fc2", f"{_MIXER}.down_proj"),
            Row("decoder.final_layernorm", "backbone.norm_f"),
            Row("output_layer", "lm_head"),
        ),
        settings={
            **{name: theirs for name, theirs in USUAL_SETTINGS.items() if name != "num_layers"},
            "num_query_groups": "num_key_value_heads",
            "kv_channels": "head_dim",
            "norm_epsilon": "layer_norm_epsilon",
            "hidden_dropout": "hidden_dropout",
            "mtp_num_layers": _DEPTHS,
        },
        optional=("num_key_value_heads", "head_dim", _DEPTHS),
        activation="mlp_hidden_act",
        activations=UNGATED,
        features=(_MLP_BIASES,),
        groups=(
            replace(
                pattern_part(MAMBA + ATTENTION + MLP + EXPERTS, _whole_pattern, lambda letters, model: {}),
                write=_written_letters,
            ),
            mamba_part(
                _SETTINGS, mixer_rows(_MIXER, norm=_NORM), read=_read_mamba, write=_written_mamba, expands=False
            ),
        ),
        by_code=("num_layers",),
        fixed={
            **{name: value for name, value in FIXED.items() if name not in _MLP_BIASES.by_code},
            "position_embedding_type": "none",
        },
        expected=_EXPECTED,
        written={name: _EXPECTED[name] for name in ("use_bias", "use_conv_bias", "attention_bias")},
        defaults={
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "hidden_size": 4096,
            "intermediate_size": 21504,
            "max_position_embeddings": 4096,
            "mlp_hidden_act": "relu2",
            "layer_norm_epsilon": 1e-5,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "initializer_range": 0.02,
            "tie_word_embeddings": False,
            "ssm_state_size": 128,
            "mamba_head_dim": 64,
            "mamba_num_heads": 128,
            "n_groups": 8,
            "conv_kernel": 4,
            "time_step_min": 0.001,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
            "num_experts_per_tok": 2,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
        },
        kinds={
            **KINDS,
            **mamba_kinds(_SETTINGS),
            "time_step_min": Annotated[float, Between(0, 1e12)],
            "hybrid_override_pattern": str,
            "mtp_hybrid_override_pattern": str,
            **dict.fromkeys(("layers_block_type", "mtp_layers_block_type"), list[str]),
            **dict.fromkeys(("use_bias", "use_conv_bias", "mamba_proj_bias", "attention_bias"), bool),
            "mamba_hidden_act": str,
            "moe_shared_expert_intermediate_size": Width,
            "routed_scaling_factor": Factor,
            **dict.fromkeys(("sliding_window", "moe_latent_size"), int),
        },
        read=lambda reader: {"num_layers": len(_letters(reader))},
        refuse=lambda model: (
            [] if model.untie_embeddings_and_output_weights else ["the output weights are the word embeddings'"]
        ),
        idle=_IDLE,
        prefix="backbone.",
        other_prefixes=("model.",),
        older_settings=_OLDER,
        later_rows=_later_rows,
        about="Nemotron-H and Nemotron 3 Nano, dense or with experts, with their layers of multi-token prediction; no "
        "experts in latents",
        example="nvidia/Nemotron-H-8B-Base-8K",
    ),
    read=_read_experts,
    write=_written_experts,
    rows=_expert_rows,
    optional=True,
)
TYPES = {"nemotron_h": NEMOTRON_H}
