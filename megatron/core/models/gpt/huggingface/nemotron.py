"""Nemotron 3 and 4, Minitron: Llama's names, squared ReLU, and LayerNorm whose weights are stored minus one."""

from __future__ import annotations

from dataclasses import replace

from megatron.core.conversion.huggingface.biases import BIASES
from megatron.core.conversion.huggingface.config_reader import UNGATED
from megatron.core.conversion.huggingface.rotary import partial_rotary
from megatron.core.conversion.tables import Row
from megatron.core.models.gpt.huggingface.llama import LLAMA, OURS, THEIRS

NEMOTRON = replace(
    LLAMA,
    architecture="NemotronForCausalLM",
    table=(
        *LLAMA.table,
        Row(f"{OURS}.mlp.linear_fc1", f"{THEIRS}.mlp.up_proj"),
        Row(f"{OURS}.mlp.linear_fc2", f"{THEIRS}.mlp.down_proj"),
    ),
    settings={**LLAMA.settings, "norm_epsilon": "norm_eps"},
    activations=UNGATED,
    features=(partial_rotary(0.5), BIASES),
    fixed={"position_embedding_type": "rope", "apply_layernorm_1p": True, "hidden_dropout": 0.0},
    defaults={
        **LLAMA.defaults,
        "hidden_act": "relu2",
        "max_position_embeddings": 4096,
        "norm_eps": 1e-5,
        "initializer_range": 0.0134,
    },
    about="Nemotron 3 and 4 and Minitron, dense; biases in attention and MLP, each or none; tied or not",
    example="nvidia/Minitron-4B-Base",
)
TYPES = {"nemotron": NEMOTRON}
