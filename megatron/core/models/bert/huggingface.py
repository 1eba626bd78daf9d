"""``config.json`` of Hugging Face's two BERTs: ``bert``, the original, and ``megatron-bert``, whose norms come first.

In the original, residuals branch off after the norms, which is ``--apply-residual-connection-post-layernorm`` here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron.config.family import group_among
from megatron.config.model import ModelConfig
from megatron.core.conversion.bounds import Count
from megatron.core.conversion.huggingface.format import HuggingFaceFormat, ModelType
from megatron.core.conversion.huggingface.known import GELUS, Known
from megatron.core.conversion.tables import Row
from megatron.core.conversion.transforms import QUERY_KEY_VALUE
from megatron.core.models.bert.config import TOKEN_TYPES, BertConfig
from megatron.errors import CheckpointError

OURS, THEIRS = "encoder.layers.{n}", "bert.encoder.layer.{n}"
_TABLE = (
    Row("embedding.word_embeddings", "bert.embeddings.word_embeddings"),
    Row("embedding.position_embeddings", "bert.embeddings.position_embeddings"),
    Row("embedding.tokentype_embeddings", "bert.embeddings.token_type_embeddings"),
    Row(
        f"{OURS}.self_attention.linear_qkv",
        tuple(f"{THEIRS}.attention.self.{name}" for name in ("query", "key", "value")),
        QUERY_KEY_VALUE,
    ),
    Row(f"{OURS}.self_attention.linear_proj", f"{THEIRS}.attention.output.dense"),
    Row(f"{OURS}.mlp.linear_fc1", f"{THEIRS}.intermediate.dense"),
    Row(f"{OURS}.mlp.linear_fc2", f"{THEIRS}.output.dense"),
    Row("lm_head.dense", "cls.predictions.transform.dense"),
    Row("lm_head.layer_norm", "cls.predictions.transform.LayerNorm"),
    Row("output_layer", "cls.predictions"),  # the bias alone: the weight is the word embeddings'
    Row("pooler.dense", "bert.pooler.dense"),
    Row("binary_head", "cls.seq_relationship"),
)
PRE_NORM = ModelType(
    architecture="MegatronBert",
    table=(
        Row(f"{OURS}.input_layernorm", f"{THEIRS}.attention.ln"),
        Row(f"{OURS}.pre_mlp_layernorm", f"{THEIRS}.ln"),
        Row("encoder.final_layernorm", "bert.encoder.ln"),
        *_TABLE,
    ),
    settings={
        "num_layers": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "num_attention_heads": "num_attention_heads",
        "ffn_hidden_size": "intermediate_size",
        "max_position_embeddings": "max_position_embeddings",
        "vocab_size": "vocab_size",
        "norm_epsilon": "layer_norm_eps",
        "attention_dropout": "attention_probs_dropout_prob",
        "hidden_dropout": "hidden_dropout_prob",
        "init_method_std": "initializer_range",
    },
    activation="hidden_act",
    activations=GELUS,
    fixed={"untie_embeddings_and_output_weights": False},
    expected={
        "is_decoder": False,
        "add_cross_attention": False,
        "type_vocab_size": TOKEN_TYPES,
        "position_embedding_type": "absolute",
        "tie_word_embeddings": True,
    },
    written={"type_vocab_size": TOKEN_TYPES},
    defaults={
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "max_position_embeddings": 512,
        "type_vocab_size": TOKEN_TYPES,
        "initializer_range": 0.02,
        "layer_norm_eps": 1e-12,
        "tie_word_embeddings": True,
    },
    prefix="bert.",
)
ORIGINAL = replace(
    PRE_NORM,
    architecture="Bert",
    table=(
        # The norm at the end of a layer of the original is the one at the start of our next.
        Row("encoder.layers.0.input_layernorm", "bert.embeddings.LayerNorm"),
        Row(f"{OURS}.input_layernorm", "bert.encoder.layer.{before}.output.LayerNorm"),
        Row(f"{OURS}.pre_mlp_layernorm", f"{THEIRS}.attention.output.LayerNorm"),
        Row("encoder.final_layernorm", "bert.encoder.layer.{last}.output.LayerNorm"),
        *_TABLE,
    ),
    fixed={**PRE_NORM.fixed, "apply_residual_connection_post_layernorm": True},
)


class BertFormat(HuggingFaceFormat):
    """Both BERTs."""

    types: Mapping[str, ModelType] = {"bert": ORIGINAL, "megatron-bert": PRE_NORM}
    kinds: Mapping[str, Any] = {
        "type_vocab_size": Count,
        "position_embedding_type": str,
        **dict.fromkeys(("is_decoder", "add_cross_attention"), bool),
    }
    unused = (".embeddings.position_ids",)
    tied_copies = ("cls.predictions.decoder.weight", "cls.predictions.decoder.bias")

    def own_settings(self, model: ModelConfig, groups: Sequence[object], model_type: str) -> dict[str, Any]:
        """The class with these heads."""
        heads = "PreTraining" if group_among(groups, BertConfig).bert_binary_head else "MaskedLM"
        return {"architectures": [f"{self.types[model_type].architecture}For{heads}"]}

    def differences(self, model: ModelConfig, groups: Sequence[object]) -> list[str]:
        """A head whose activation isn't that of the layers."""
        unlike = group_among(groups, BertConfig).exact_gelu_head and model.activation != "gelu"
        return ["the GELU is exact in the head only (--exact-gelu-head)"] if unlike else []

    def groups_from_config(self, known: Known, tensors: Collection[str], *, where: str) -> tuple[object, ...]:
        """With a head for the order of texts where there are tensors of one."""
        if not any(name.startswith("cls.predictions.") for name in tensors):
            raise CheckpointError(
                f"{where} holds no head for masked tokens (cls.predictions): convert a BertForPreTraining or a "
                "BertForMaskedLM, which have this head"
            )
        return (BertConfig(bert_binary_head="cls.seq_relationship.weight" in tensors),)

    def is_unused(self, name: str) -> bool:
        """Also the pooler of a model without the head that reads it."""
        return super().is_unused(name) or name.startswith("bert.pooler.")


FORMAT = BertFormat()
