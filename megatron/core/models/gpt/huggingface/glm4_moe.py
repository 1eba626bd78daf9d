"""GLM-4.5 and 4.6: DeepSeek-V3's experts and later tokens, with ordinary attention of which half is rotated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.config.model import ModelConfig
from megatron.core.conversion.bounds import Factor
from megatron.core.conversion.huggingface.biases import biases
from megatron.core.conversion.huggingface.known import Known
from megatron.core.conversion.huggingface.rotary import read_rotary, written_rotary
from megatron.core.models.gpt.huggingface.deepseek import (
    BIASED_DEFAULTS,
    LATER_ROWS,
    biased_experts,
    biased_rows,
    later_copies,
    later_layer,
    written_biased,
)
from megatron.core.models.gpt.huggingface.experts import KINDS, with_experts
from megatron.core.models.gpt.huggingface.llama import LLAMA


def _read(known: Known) -> dict[str, Any]:
    return {
        **biases(qkv=known("attention_bias"), output=False, mlp=False),
        **read_rotary(known, partial=True),
        "qk_layernorm": known("use_qk_norm"),
    }


def _write(model: ModelConfig) -> dict[str, Any]:
    rotary = written_rotary(model, partial=True)
    return {**rotary, "attention_bias": model.add_qkv_bias, "use_qk_norm": model.qk_layernorm}


GLM4_MOE = with_experts(
    replace(
        LLAMA,
        architecture="Glm4MoeForCausalLM",
        table=(*LLAMA.table, *later_layer(LLAMA.table), *LATER_ROWS),
        settings={**LLAMA.settings, "mtp_num_layers": "num_nextn_predict_layers"},
        optional=(*LLAMA.optional, "num_nextn_predict_layers"),
        copies=later_copies,
        by_code=(*LLAMA.by_code, "rotary_percent", "qk_layernorm"),
        fixed={**LLAMA.fixed, "add_bias_linear": False, "add_attention_output_bias": False, "add_mlp_bias": False},
        defaults={
            **{name: value for name, value in LLAMA.defaults.items() if name != "mlp_bias"},
            **BIASED_DEFAULTS,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "use_qk_norm": False,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.0,
        },
        kinds={**LLAMA.kinds, **KINDS, "use_qk_norm": bool, "attention_bias": bool, "routed_scaling_factor": Factor},
        expected={"norm_topk_prob": True},
        read=_read,
        write=_write,
        refuse=lambda model: [],
        about="GLM-4.5, 4.5-Air and 4.6, with their layers of multi-token prediction",
        example="zai-org/GLM-4.5-Air",
    ),
    read=biased_experts,
    write=written_biased,
    rows=biased_rows,
)

TYPES = {"glm4_moe": GLM4_MOE}
