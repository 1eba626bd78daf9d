"""Phi 1, 1.5 and 2: attention and MLP in parallel with one norm, biases everywhere, and a part of each head rotated."""

from __future__ import annotations

from dataclasses import replace

from megatron.core.conversion.huggingface.config_reader import UNGATED
from megatron.core.conversion.huggingface.rotary import partial_rotary
from megatron.core.conversion.tables import Row
from megatron.core.conversion.transforms import PER_HEAD
from megatron.core.models.gpt.huggingface.llama import LLAMA, OURS, THEIRS

PHI = replace(
    LLAMA,
    architecture="PhiForCausalLM",
    table=(
        *LLAMA.table,
        Row(f"{OURS}.self_attention.q_layernorm", f"{THEIRS}.self_attn.q_layernorm", PER_HEAD),
        Row(f"{OURS}.self_attention.k_layernorm", f"{THEIRS}.self_attn.k_layernorm", PER_HEAD),
        Row(f"{OURS}.self_attention.linear_proj", f"{THEIRS}.self_attn.dense"),
        Row(f"{OURS}.mlp.linear_fc1", f"{THEIRS}.mlp.fc1"),
        Row(f"{OURS}.mlp.linear_fc2", f"{THEIRS}.mlp.fc2"),
        Row("decoder.final_layernorm", "model.final_layernorm"),
    ),
    settings={
        **LLAMA.settings,
        "norm_epsilon": "layer_norm_eps",
        "hidden_dropout": "resid_pdrop",
        "qk_layernorm": "qk_layernorm",
    },
    activations=UNGATED,
    features=(partial_rotary(0.5),),
    fixed={"position_embedding_type": "rope", "parallel_attention": True, "add_output_layer_bias": True},
    defaults={
        "hidden_act": "gelu_new",
        "max_position_embeddings": 2048,
        "layer_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "attention_dropout": 0.0,
        "resid_pdrop": 0.0,
        "tie_word_embeddings": False,
        "qk_layernorm": False,
    },
    shared_settings={"embd_pdrop": "hidden_dropout"},
    about="Phi 1, 1.5 and 2; queries and keys normalized or not; tied or not",
    example="microsoft/phi-2",
)
TYPES = {"phi": PHI}
