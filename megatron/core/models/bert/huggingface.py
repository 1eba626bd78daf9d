"""``config.json`` of Hugging Face's two BERTs: ``bert``, the original, and ``megatron-bert``, whose norms come first.

In the original, residuals branch off after the norms, which is ``--apply-residual-connection-post-layernorm`` here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from megatron.config.family import group_among
from megatron.config.model import ModelConfig
from megatron.core.conversion.bounds import Count, Rate, Small
from megatron.core.conversion.huggingface.format import HuggingFaceFormat
from megatron.core.conversion.huggingface.known import Json, Known, not_original
from megatron.core.conversion.tables import Row
from megatron.core.conversion.transforms import QueryKeyValue
from megatron.core.models.bert.config import TOKEN_TYPES, BertConfig
from megatron.errors import CheckpointError

ORIGINAL, PRE_NORM = "bert", "megatron-bert"
_WEIGHT_AND_BIAS = ("weight", "bias")
_DEFAULTS = {
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": 512,
    "type_vocab_size": TOKEN_TYPES,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-12,
    "tie_word_embeddings": True,
}
_CLASS_PREFIX = {ORIGINAL: "Bert", PRE_NORM: "MegatronBert"}

BERT_LAYER, THEIR_BERT_LAYER = "encoder.layers.{n}", "bert.encoder.layer.{n}"


def _both(ours: str, theirs: str) -> tuple[Row, Row]:
    return Row(f"{ours}.weight", (f"{theirs}.weight",)), Row(f"{ours}.bias", (f"{theirs}.bias",))


def _bert(norms: Sequence[Row]) -> tuple[Row, ...]:
    """A BERT's rows; where its ``norms`` are is what tells the two kinds apart."""
    layer, self_attention = THEIR_BERT_LAYER, f"{THEIR_BERT_LAYER}.attention.self"
    three = {
        kind: tuple(f"{self_attention}.{name}.{kind}" for name in ("query", "key", "value"))
        for kind in _WEIGHT_AND_BIAS
    }
    return (
        Row("embedding.word_embeddings.weight", ("bert.embeddings.word_embeddings.weight",)),
        Row("embedding.position_embeddings.weight", ("bert.embeddings.position_embeddings.weight",)),
        Row("embedding.tokentype_embeddings.weight", ("bert.embeddings.token_type_embeddings.weight",)),
        *norms,
        *(
            Row(f"{BERT_LAYER}.self_attention.linear_qkv.{kind}", three[kind], QueryKeyValue())
            for kind in _WEIGHT_AND_BIAS
        ),
        *_both(f"{BERT_LAYER}.self_attention.linear_proj", f"{layer}.attention.output.dense"),
        *_both(f"{BERT_LAYER}.mlp.linear_fc1", f"{layer}.intermediate.dense"),
        *_both(f"{BERT_LAYER}.mlp.linear_fc2", f"{layer}.output.dense"),
        *_both("lm_head.dense", "cls.predictions.transform.dense"),
        *_both("lm_head.layer_norm", "cls.predictions.transform.LayerNorm"),
        Row("output_layer.bias", ("cls.predictions.bias",)),
        *_both("pooler.dense", "bert.pooler.dense"),
        *_both("binary_head", "cls.seq_relationship"),
    )


# The norm at the end of a layer of the original is the one at the start of our next.
BERT = _bert(
    (
        *_both("encoder.layers.0.input_layernorm", "bert.embeddings.LayerNorm"),
        *_both(f"{BERT_LAYER}.input_layernorm", "bert.encoder.layer.{before}.output.LayerNorm"),
        *_both(f"{BERT_LAYER}.pre_mlp_layernorm", f"{THEIR_BERT_LAYER}.attention.output.LayerNorm"),
        *_both("encoder.final_layernorm", "bert.encoder.layer.{last}.output.LayerNorm"),
    )
)
MEGATRON_BERT = _bert(
    (
        *_both(f"{BERT_LAYER}.input_layernorm", f"{THEIR_BERT_LAYER}.attention.ln"),
        *_both(f"{BERT_LAYER}.pre_mlp_layernorm", f"{THEIR_BERT_LAYER}.ln"),
        *_both("encoder.final_layernorm", "bert.encoder.ln"),
    )
)


class BertFormat(HuggingFaceFormat):
    """Both BERTs."""

    model_types = (ORIGINAL, PRE_NORM)
    kinds: Mapping[str, Any] = {
        "type_vocab_size": Count,
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), Rate),
        "layer_norm_eps": Small,
        "position_embedding_type": str,
        **dict.fromkeys(("is_decoder", "add_cross_attention"), bool),
    }
    unused = (".embeddings.position_ids",)
    tied_copies = ("cls.predictions.decoder.weight", "cls.predictions.decoder.bias")

    def defaults(self, model_type: str) -> Mapping[str, Any]:
        """The same for both."""
        return _DEFAULTS

    def model_from_config(self, known: Known, model_type: str) -> ModelConfig:
        """The architecture."""
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
            activation=known.gelu("hidden_act"),
            apply_residual_connection_post_layernorm=model_type == ORIGINAL,
            attention_dropout=known("attention_probs_dropout_prob"),
            hidden_dropout=known("hidden_dropout_prob"),
            init_method_std=known("initializer_range"),
        )

    def groups_from_config(self, known: Known, tensors: Collection[str], *, where: str) -> tuple[object, ...]:
        """With a head for the order of texts where there are tensors of one."""
        if not any(name.startswith("cls.predictions.") for name in tensors):
            raise CheckpointError(
                f"{where} holds no head for hidden words (cls.predictions): convert a BertForPreTraining or a "
                "BertForMaskedLM, which have this head"
            )
        return (BertConfig(bert_binary_head="cls.seq_relationship.weight" in tensors),)

    def config_from_model(self, model: ModelConfig, groups: Sequence[object], source: Json) -> dict[str, Any]:
        """Type, class and sizes."""
        group = group_among(groups, BertConfig)
        model_type = _type_of(model, group)
        heads = "PreTraining" if group.bert_binary_head else "MaskedLM"
        return {
            "architectures": [f"{_CLASS_PREFIX[model_type]}For{heads}"],
            "model_type": model_type,
            "num_hidden_layers": model.num_layers,
            "hidden_size": model.hidden_size,
            "num_attention_heads": model.num_attention_heads,
            "intermediate_size": model.ffn_hidden_size,
            "max_position_embeddings": model.max_position_embeddings,
            "type_vocab_size": TOKEN_TYPES,
            "hidden_act": "gelu" if model.activation == "gelu" else "gelu_new",
            "layer_norm_eps": model.norm_epsilon,
            "hidden_dropout_prob": model.hidden_dropout,
            "attention_probs_dropout_prob": model.attention_dropout,
            "initializer_range": model.init_method_std,
        }

    def table(self, model_type: str, model: ModelConfig) -> Sequence[Row]:
        """By where the norms are."""
        return BERT if model_type == ORIGINAL else MEGATRON_BERT

    def prefix(self, model_type: str) -> str:
        """The same for both."""
        return "bert."

    def is_unused(self, name: str) -> bool:
        """Also the pooler of a model without the head that reads it."""
        return super().is_unused(name) or name.startswith("bert.pooler.")


FORMAT = BertFormat()


def _type_of(model: ModelConfig, group: BertConfig) -> str:
    """The model type of a BERT; CheckpointError for an architecture that transformers lacks."""
    untied = ["the output weights are not the word embeddings'"] if model.untie_embeddings_and_output_weights else []
    unlike = group.exact_gelu_head and model.activation != "gelu"
    reasons = not_original(model) + untied + ["the GELU is exact in the head only (--exact-gelu-head)"] * unlike
    if reasons:
        raise CheckpointError(f"Hugging Face has no BERT of this architecture: {'; '.join(reasons)}")
    return ORIGINAL if model.apply_residual_connection_post_layernorm else PRE_NORM
