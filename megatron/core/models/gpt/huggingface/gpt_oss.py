"""gpt-oss: attention sinks, windows in every second layer, and clamped experts with biases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from megatron.config.moe import MoEConfig
from megatron.core.conversion.bounds import Factor
from megatron.core.conversion.huggingface.biases import biases
from megatron.core.conversion.huggingface.config_reader import ConfigReader
from megatron.core.conversion.huggingface.rotary import ROTARY, read_rotary, written_rotary
from megatron.core.conversion.huggingface.windows import every_second, windows_where
from megatron.core.conversion.tables import Row
from megatron.core.conversion.transforms import Transform
from megatron.core.models.gpt.huggingface.experts import KINDS, with_experts
from megatron.core.models.gpt.huggingface.llama import LLAMA, OURS, THEIRS
from megatron.core.models.gpt.huggingface.mixtral import MIXTRAL

_ALPHA = 1.702
# What transformers takes where no setting says anything of rotary positions.
_USUAL_ROTARY = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _pairs_apart(tensor: Tensor) -> Tensor:
    """``[E, h, 2f]`` or ``[E, 2f]`` of neighbouring gates and values to ``[E, 2, f, h]`` or ``[E, 2, f]``."""
    apart = tensor.view(*tensor.shape[:-1], -1, 2)
    return (apart.permute(0, 3, 2, 1) if tensor.dim() == 3 else apart.transpose(1, 2)).contiguous()


def _pairs_together(tensor: Tensor) -> Tensor:
    together = tensor.permute(0, 3, 2, 1) if tensor.dim() == 4 else tensor.transpose(1, 2)
    return together.flatten(-2).contiguous()


_PAIRS = Transform(lambda parts, model: _pairs_apart(parts[0]), lambda tensor, model: [_pairs_together(tensor)])
_OUTPUTS_FIRST = Transform(
    lambda parts, model: parts[0].transpose(1, 2).contiguous(),
    lambda tensor, model: [tensor.transpose(1, 2).contiguous()],
)


def _read_rotary(reader: ConfigReader) -> dict[str, Any]:
    is_said = reader.get("rope_scaling") or reader.get("rope_parameters") is not None
    return read_rotary(reader if is_said else reader.but(rope_parameters=_USUAL_ROTARY))


def _rows(moe: MoEConfig) -> Sequence[Row]:
    ours, theirs = f"{OURS}.mlp.experts", f"{THEIRS}.mlp.experts"
    return (
        Row(f"{OURS}.mlp.router", f"{THEIRS}.mlp.router"),
        Row(f"{ours}.linear_fc1.weight", f"{theirs}.gate_up_proj", _PAIRS, is_parameter=True),
        Row(f"{ours}.linear_fc1.bias", f"{theirs}.gate_up_proj_bias", _PAIRS, is_parameter=True),
        Row(f"{ours}.linear_fc2.weight", f"{theirs}.down_proj", _OUTPUTS_FIRST, is_parameter=True),
        Row(f"{ours}.linear_fc2.bias", f"{theirs}.down_proj_bias", is_parameter=True),
    )


GPT_OSS = with_experts(
    replace(
        LLAMA,
        architecture="GptOssForCausalLM",
        table=(
            *(row for row in LLAMA.table if ".mlp." not in row.ours),
            Row(f"{OURS}.self_attention", f"{THEIRS}.self_attn"),
        ),
        settings={**LLAMA.settings, "activation_func_clamp_value": "swiglu_limit"},
        activations={"silu": "quick_geglu"},
        features=(replace(ROTARY, read=_read_rotary), windows_where(every_second, sliding_window=128)),
        fixed={
            **LLAMA.fixed,
            **biases(qkv=True, output=True, mlp=True),
            "glu_linear_offset": 1.0,
            "softmax_type": "learnable",
        },
        expected={"attention_bias": True, "swiglu_alpha": _ALPHA},
        written={"attention_bias": True},
        defaults={
            **LLAMA.defaults,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "head_dim": 64,
            "num_key_value_heads": 8,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_limit": 7.0,
            "rope_theta": 150000.0,
        },
        kinds={
            **KINDS,
            **dict.fromkeys(("swiglu_limit", "swiglu_alpha"), Factor),
            "attention_bias": bool,
        },
        write=lambda model: {"rope_scaling": written_rotary(model)["rope_scaling"] or {"rope_type": "default"}},
        refuse=lambda model: ["experts are not clamped"] if model.activation_func_clamp_value is None else [],
        about="gpt-oss: sinks, sliding windows in any layers, YaRN",
        example="openai/gpt-oss-20b",
    ),
    read=MIXTRAL.groups[0].read,
    write=MIXTRAL.groups[0].write,
    rows=_rows,
)

TYPES = {"gpt_oss": GPT_OSS}
