"""StarCoder2: Llama's names, with LayerNorm, an MLP without a gate, and biases."""

from __future__ import annotations

from dataclasses import replace

from megatron.core.conversion.huggingface.biases import even_biases
from megatron.core.conversion.huggingface.config_reader import UNGATED
from megatron.core.conversion.huggingface.rotary import ROTARY
from megatron.core.conversion.huggingface.windows import WINDOW
from megatron.core.conversion.tables import Row
from megatron.core.models.gpt.huggingface.llama import LLAMA, OURS, THEIRS

STARCODER2 = replace(
    LLAMA,
    architecture="Starcoder2ForCausalLM",
    table=(
        *LLAMA.table,
        Row(f"{OURS}.mlp.linear_fc1", f"{THEIRS}.mlp.c_fc"),
        Row(f"{OURS}.mlp.linear_fc2", f"{THEIRS}.mlp.c_proj"),
    ),
    settings={**LLAMA.settings, "norm_epsilon": "norm_epsilon", "hidden_dropout": "residual_dropout"},
    activations=UNGATED,
    fixed={"position_embedding_type": "rope"},
    features=(ROTARY, even_biases("use_bias", default=True), WINDOW),
    defaults={
        "hidden_act": "gelu_pytorch_tanh",
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "norm_epsilon": 1e-5,
        "initializer_range": 0.018042,
        "attention_dropout": 0.0,
        "residual_dropout": 0.0,
        "tie_word_embeddings": True,
    },
    shared_settings={"embedding_dropout": "hidden_dropout"},
    about="StarCoder 2, with its window or full attention; biases in all linear layers or in none; tied or not",
    example="bigcode/starcoder2-3b",
)
TYPES = {"starcoder2": STARCODER2}
