"""BLOOM: ALiBi, and a norm after the embedding."""

from __future__ import annotations

from megatron.core.conversion.bounds import Count
from megatron.core.conversion.huggingface.format import ModelType
from megatron.core.conversion.tables import Row
from megatron.core.conversion.transforms import GROUPED

OURS, THEIRS = "decoder.layers.{n}", "transformer.h.{n}"

BLOOM = ModelType(
    architecture="BloomForCausalLM",
    table=(
        Row("embedding.word_embeddings", "transformer.word_embeddings"),
        Row("embedding.norm", "transformer.word_embeddings_layernorm"),
        Row(f"{OURS}.input_layernorm", f"{THEIRS}.input_layernorm"),
        Row(f"{OURS}.self_attention.linear_qkv", f"{THEIRS}.self_attention.query_key_value", GROUPED),
        Row(f"{OURS}.self_attention.linear_proj", f"{THEIRS}.self_attention.dense"),
        Row(f"{OURS}.pre_mlp_layernorm", f"{THEIRS}.post_attention_layernorm"),
        Row(f"{OURS}.mlp.linear_fc1", f"{THEIRS}.mlp.dense_h_to_4h"),
        Row(f"{OURS}.mlp.linear_fc2", f"{THEIRS}.mlp.dense_4h_to_h"),
        Row("decoder.final_layernorm", "transformer.ln_f"),
        Row("output_layer", "lm_head"),
    ),
    settings={
        "num_layers": "n_layer",
        "hidden_size": "hidden_size",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "seq_length",
        "vocab_size": "vocab_size",
        "norm_epsilon": "layer_norm_epsilon",
        "attention_dropout": "attention_dropout",
        "hidden_dropout": "hidden_dropout",
        "init_method_std": "initializer_range",
        "apply_residual_connection_post_layernorm": "apply_residual_connection_post_layernorm",
    },
    fixed={"position_embedding_type": "alibi", "embedding_norm": True},
    defaults={
        "seq_length": 2048,
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "apply_residual_connection_post_layernorm": False,
    },
    kinds={"seq_length": Count},
    prefix="transformer.",
    tied_copies=("lm_head.weight",),
    older_settings={"n_embed": "hidden_size", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
    about="BLOOM and BLOOMZ, 560M to 176B; tied or not",
    example="bigscience/bloom-560m",
)
TYPES = {"bloom": BLOOM}
