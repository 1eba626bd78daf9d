"""Hugging Face's two BERTs: ``bert``, the original, and ``megatron-bert``, whose norms come first.

In the original, residuals branch off after the norms, which is ``--apply-residual-connection-post-layernorm`` here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.config.model import ModelConfig
from megatron.core.conversion.bounds import Count
from megatron.core.conversion.huggingface.config_reader import GELUS
from megatron.core.conversion.huggingface.format import USUAL_SETTINGS, ModelType
from megatron.core.conversion.tables import Row
from megatron.core.conversion.transforms import QUERY_KEY_VALUE


def body(name: str, *, pre_norm: bool) -> tuple[Row, ...]:
    """Rows of the embeddings and layers, whose names begin with ``name``."""
    ours, theirs = "encoder.layers.{n}", f"{name}.encoder.layer.{{n}}"
    norms: tuple[Row, ...]
    if pre_norm:
        norms = (
            Row(f"{ours}.input_layernorm", f"{theirs}.attention.ln"),
            Row(f"{ours}.pre_mlp_layernorm", f"{theirs}.ln"),
            Row("encoder.final_layernorm", f"{name}.encoder.ln"),
        )
    else:  # the norm at the end of a layer of the original is the one at the start of our next
        norms = (
            Row("encoder.layers.0.input_layernorm", f"{name}.embeddings.LayerNorm"),
            Row(f"{ours}.input_layernorm", f"{name}.encoder.layer.{{before}}.output.LayerNorm"),
            Row(f"{ours}.pre_mlp_layernorm", f"{theirs}.attention.output.LayerNorm"),
            Row("encoder.final_layernorm", f"{name}.encoder.layer.{{last}}.output.LayerNorm"),
        )
    return (
        *norms,
        Row("embedding.word_embeddings", f"{name}.embeddings.word_embeddings"),
        Row("embedding.position_embeddings", f"{name}.embeddings.position_embeddings"),
        Row("embedding.tokentype_embeddings", f"{name}.embeddings.token_type_embeddings"),
        Row(
            f"{ours}.self_attention.linear_qkv",
            tuple(f"{theirs}.attention.self.{part}" for part in ("query", "key", "value")),
            QUERY_KEY_VALUE,
        ),
        Row(f"{ours}.self_attention.linear_proj", f"{theirs}.attention.output.dense"),
        Row(f"{ours}.mlp.linear_fc1", f"{theirs}.intermediate.dense"),
        Row(f"{ours}.mlp.linear_fc2", f"{theirs}.output.dense"),
    )


def output(head: str) -> dict[str, Any]:
    """Fields of a type whose output layer is part of the module ``head``: of a tied one the bias alone."""

    def rows(model: ModelConfig) -> tuple[Row, ...]:
        return (Row("output_layer", f"{head}.decoder" if model.untie_embeddings_and_output_weights else head),)

    def copies(model: ModelConfig) -> dict[str, str]:
        """transformers 4 reads the bias where a tied one is, 5 where the weight is."""
        return {f"{head}.bias": f"{head}.decoder.bias"} if model.untie_embeddings_and_output_weights else {}

    return {"rows": rows, "copies": copies, "tied_copies": (f"{head}.decoder.weight", f"{head}.decoder.bias")}


_HEADS = (
    Row("lm_head.dense", "cls.predictions.transform.dense"),
    Row("lm_head.layer_norm", "cls.predictions.transform.LayerNorm"),
    Row("pooler.dense", "bert.pooler.dense"),
    Row("binary_head", "cls.seq_relationship"),
)
PRE_NORM = ModelType(
    architecture="MegatronBert",
    table=(*body("bert", pre_norm=True), *_HEADS),
    settings={
        **USUAL_SETTINGS,
        "norm_epsilon": "layer_norm_eps",
        "attention_dropout": "attention_probs_dropout_prob",
        "hidden_dropout": "hidden_dropout_prob",
    },
    activation="hidden_act",
    activations=GELUS,
    expected={"is_decoder": False, "add_cross_attention": False, "position_embedding_type": "absolute"},
    defaults={
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "initializer_range": 0.02,
        "layer_norm_eps": 1e-12,
        "tie_word_embeddings": True,
    },
    kinds={
        "type_vocab_size": Count,
        "position_embedding_type": str,
        **dict.fromkeys(("is_decoder", "add_cross_attention"), bool),
    },
    prefix="bert.",
    heads=("cls.predictions.", "cls.seq_relationship."),
    unused=(".embeddings.position_ids",),
    about="Megatron-LM's BERT, whose norms come first; with or without the sentence-order head; tied or not",
    **output("cls.predictions"),
)
TYPES = {
    "bert": replace(
        PRE_NORM,
        architecture="Bert",
        table=(*body("bert", pre_norm=False), *_HEADS),
        fixed={"apply_residual_connection_post_layernorm": True},
        about=(
            "BERT, here with --apply-residual-connection-post-layernorm; with or without the sentence-order head; tied "
            "or not"
        ),
        example="google-bert/bert-base-uncased",
    ),
    "megatron-bert": PRE_NORM,
}
