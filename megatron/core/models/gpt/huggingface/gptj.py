"""GPT-J: attention without biases and an MLP with them in parallel, one norm, and rotary pairs of neighbours."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.core.conversion.bounds import Count
from megatron.core.conversion.huggingface.config_reader import UNGATED, ConfigReader
from megatron.core.conversion.tables import Row
from megatron.core.conversion.transforms import NEIGHBOURING_QUERY_KEY_VALUE
from megatron.core.models.gpt.huggingface.gpt2 import GPT2, OURS, THEIRS


def _read(reader: ConfigReader) -> dict[str, Any]:
    width, turned = reader("n_embd") // reader("n_head"), reader("rotary_dim")
    if turned > width or turned % 2:
        raise reader.refuse("rotary_dim", f"it must be an even number of at most {width}, the width of a head")
    return {"rotary_percent": turned / width, "rotary_interleaved": True}


GPTJ = replace(
    GPT2,
    architecture="GPTJForCausalLM",
    table=(
        Row("embedding.word_embeddings", "transformer.wte"),
        Row(f"{OURS}.input_layernorm", f"{THEIRS}.ln_1"),
        Row(
            f"{OURS}.self_attention.linear_qkv",
            tuple(f"{THEIRS}.attn.{name}_proj" for name in "qkv"),
            NEIGHBOURING_QUERY_KEY_VALUE,
        ),
        Row(f"{OURS}.self_attention.linear_proj", f"{THEIRS}.attn.out_proj"),
        Row(f"{OURS}.mlp.linear_fc1", f"{THEIRS}.mlp.fc_in"),
        Row(f"{OURS}.mlp.linear_fc2", f"{THEIRS}.mlp.fc_out"),
        Row("decoder.final_layernorm", "transformer.ln_f"),
        Row("output_layer", "lm_head"),
    ),
    activations=UNGATED,
    by_code=("rotary_percent",),
    fixed={
        "position_embedding_type": "rope",
        "parallel_attention": True,
        "add_bias_linear": False,
        "add_mlp_bias": True,
        "add_output_layer_bias": True,
    },
    expected={},
    defaults={
        "activation_function": "gelu_new",
        "n_positions": 2048,
        "rotary_dim": 64,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": False,
        "resid_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "initializer_range": 0.02,
    },
    kinds={"rotary_dim": Count},
    read=_read,
    write=lambda model: {"rotary_dim": model.rotary_width},
    about="GPT-J 6B and others: any part of each head rotated; tied or not",
    example="EleutherAI/gpt-j-6b",
)
TYPES = {"gptj": GPTJ}
