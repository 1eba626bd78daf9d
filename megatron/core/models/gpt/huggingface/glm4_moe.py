"""GLM-4.5 and 4.6: DeepSeek-V3's experts and future tokens, with ordinary attention of which half is rotated."""

from __future__ import annotations

from dataclasses import replace

from megatron.core.conversion.bounds import Factor
from megatron.core.conversion.huggingface.biases import query_biases
from megatron.core.conversion.huggingface.rotary import partial_rotary
from megatron.core.models.gpt.huggingface.deepseek import (
    BIASED_DEFAULTS,
    MTP_ROWS,
    biased_experts,
    biased_rows,
    mtp_copies,
    mtp_layer,
    written_biased,
)
from megatron.core.models.gpt.huggingface.experts import KINDS, with_experts
from megatron.core.models.gpt.huggingface.llama import LLAMA

GLM4_MOE = with_experts(
    replace(
        LLAMA,
        architecture="Glm4MoeForCausalLM",
        table=(*LLAMA.table, *mtp_layer(LLAMA.table), *MTP_ROWS),
        settings={
            **LLAMA.settings,
            "mtp_num_layers": "num_nextn_predict_layers",
            "qk_layernorm": "use_qk_norm",
        },
        optional=(*LLAMA.optional, "num_nextn_predict_layers"),
        copies=mtp_copies,
        features=(partial_rotary(0.5), query_biases("attention_bias", default=False)),
        defaults={
            **LLAMA.defaults,
            **BIASED_DEFAULTS,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
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
        kinds={**KINDS, "routed_scaling_factor": Factor},
        about="GLM-4.5, 4.5-Air and 4.6, with their layers of multi-token prediction",
        example="zai-org/GLM-4.5-Air",
    ),
    read=biased_experts,
    write=written_biased,
    rows=biased_rows,
)

TYPES = {"glm4_moe": GLM4_MOE}
