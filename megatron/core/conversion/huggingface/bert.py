"""``config.json`` of Hugging Face's two BERTs: ``bert``, the original, and ``megatron-bert``, whose norms come first.

The original's residuals start behind the norms, which is ``--apply-residual-connection-post-layernorm`` here.
"""

from __future__ import annotations

from typing import Any

from megatron.config.bert import TOKEN_TYPES, BertConfig
from megatron.config.model import ModelConfig
from megatron.core.conversion.huggingface.known import Known, not_original
from megatron.errors import CheckpointError

ORIGINAL, PRE_NORM = "bert", "megatron-bert"
FAMILIES = (ORIGINAL, PRE_NORM)
DEFAULTS = {
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": 512,
    "type_vocab_size": TOKEN_TYPES,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-12,
    "tie_word_embeddings": True,
}
_PREFIX = {ORIGINAL: "Bert", PRE_NORM: "MegatronBert"}


def model_from_config(known: Known, family: str) -> ModelConfig:
    """The architecture; CheckpointError for a setting that isn't here."""
    known.expect(
        is_decoder=False,
        add_cross_attention=False,
        type_vocab_size=TOKEN_TYPES,
        position_embedding_type="absolute",
        tie_word_embeddings=True,
    )
    return ModelConfig(
        num_layers=known("num_hidden_layers"),
        hidden_size=known("hidden_size"),
        num_attention_heads=known("num_attention_heads"),
        ffn_hidden_size=known("intermediate_size"),
        max_position_embeddings=known("max_position_embeddings"),
        vocab_size=known("vocab_size"),
        norm_epsilon=known("layer_norm_eps"),
        exact_gelu=known.exact_gelu("hidden_act"),
        apply_residual_connection_post_layernorm=family == ORIGINAL,
        attention_dropout=known("attention_probs_dropout_prob"),
        hidden_dropout=known("hidden_dropout_prob"),
        init_method_std=known("initializer_range"),
    )


def config_from_model(model: ModelConfig, group: BertConfig) -> dict[str, Any]:
    """Family, class and sizes; CheckpointError for a BERT of an architecture of its own."""
    family = family_of(model, group)
    heads = "PreTraining" if group.bert_binary_head else "MaskedLM"
    return {
        "architectures": [f"{_PREFIX[family]}For{heads}"],
        "model_type": family,
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "intermediate_size": model.ffn_hidden_size,
        "max_position_embeddings": model.max_position_embeddings,
        "type_vocab_size": TOKEN_TYPES,
        "hidden_act": "gelu" if model.exact_gelu else "gelu_new",
        "layer_norm_eps": model.norm_epsilon,
        "hidden_dropout_prob": model.hidden_dropout,
        "attention_probs_dropout_prob": model.attention_dropout,
    }


def family_of(model: ModelConfig, group: BertConfig) -> str:
    """The family a BERT belongs to; CheckpointError when it is one of its own."""
    untied = ["the output weights are not the word embeddings'"] if model.untie_embeddings_and_output_weights else []
    unlike = group.exact_gelu_head and not model.exact_gelu
    reasons = not_original(model) + untied + ["only the head's GELU is exact (--exact-gelu-head)"] * unlike
    if reasons:
        raise CheckpointError(f"Hugging Face has no BERT of this architecture: {'; '.join(reasons)}")
    return ORIGINAL if model.apply_residual_connection_post_layernorm else PRE_NORM
