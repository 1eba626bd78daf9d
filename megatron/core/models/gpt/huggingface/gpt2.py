"""GPT-2."""

from __future__ import annotations

from megatron.core.conversion.huggingface.config_reader import GELUS
from megatron.core.conversion.huggingface.format import ModelType
from megatron.core.conversion.tables import Row
from megatron.core.conversion.transforms import TRANSPOSED, TRANSPOSED_THIRDS

OURS, THEIRS = "decoder.layers.{n}", "transformer.h.{n}"

GPT2 = ModelType(
    architecture="GPT2LMHeadModel",
    table=(
        Row("embedding.word_embeddings", "transformer.wte"),
        Row("embedding.position_embeddings", "transformer.wpe"),
        Row(f"{OURS}.input_layernorm", f"{THEIRS}.ln_1"),
        Row(f"{OURS}.self_attention.linear_qkv", f"{THEIRS}.attn.c_attn", TRANSPOSED_THIRDS),
        Row(f"{OURS}.self_attention.linear_proj", f"{THEIRS}.attn.c_proj", TRANSPOSED),
        Row(f"{OURS}.pre_mlp_layernorm", f"{THEIRS}.ln_2"),
        Row(f"{OURS}.mlp.linear_fc1", f"{THEIRS}.mlp.c_fc", TRANSPOSED),
        Row(f"{OURS}.mlp.linear_fc2", f"{THEIRS}.mlp.c_proj", TRANSPOSED),
        Row("decoder.final_layernorm", "transformer.ln_f"),
        Row("output_layer", "lm_head"),
    ),
    settings={
        "num_layers": "n_layer",
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "ffn_hidden_size": "n_inner",
        "max_position_embeddings": "n_positions",
        "vocab_size": "vocab_size",
        "norm_epsilon": "layer_norm_epsilon",
        "attention_dropout": "attn_pdrop",
        "hidden_dropout": "resid_pdrop",
        "init_method_std": "initializer_range",
    },
    optional=("n_inner",),
    activation="activation_function",
    activations=GELUS,
    expected={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    defaults={
        "activation_function": "gelu_new",
        "n_positions": 1024,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "resid_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "initializer_range": 0.02,
    },
    kinds=dict.fromkeys(("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "add_cross_attention"), bool),
    shared_settings={"embd_pdrop": "hidden_dropout"},
    prefix="transformer.",
    unused=(".attn.bias", ".attn.masked_bias"),
    tied_copies=("lm_head.weight",),
    about="GPT-2, with the tanh or the exact GELU, tied or not",
    example="openai-community/gpt2",
)
TYPES = {"gpt2": GPT2}
