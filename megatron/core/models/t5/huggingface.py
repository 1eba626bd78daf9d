"""``config.json`` of Hugging Face's T5, the original and v1.1, which differ in the MLP and in the output.

The original's output is the word embeddings', given hidden states scaled by 1 / sqrt(hidden size); v1.1 has an output
of its own, unscaled. transformers 4 says both with ``tie_word_embeddings``; 5 says the scale with
``scale_decoder_outputs`` and unties where the files hold an ``lm_head`` that differs, whatever the settings say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from megatron.config.family import group_among
from megatron.config.model import Activation, ModelConfig
from megatron.core.conversion.bounds import Count, Heads, Layers, Rate, Small, Width
from megatron.core.conversion.huggingface.format import HuggingFaceFormat
from megatron.core.conversion.huggingface.known import GELUS, Json, Known
from megatron.core.conversion.portable import LazyTensor
from megatron.core.conversion.tables import Row
from megatron.core.conversion.transforms import KeyValue, QueryKeyValue, Same, Stacked
from megatron.core.models.t5.config import T5Config
from megatron.core.tokenizers.base import Tokenizer
from megatron.errors import CheckpointError

_DEFAULTS = {
    "feed_forward_proj": "relu",
    "n_positions": 512,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "dropout_rate": 0.1,
    "layer_norm_epsilon": 1e-6,
}


def _stack(stack: str, *, gated: bool) -> tuple[Row, ...]:
    """Rows of the encoder or the decoder; of its layers' parts the MLP is the last, cross-attention between."""
    ours, theirs = f"{stack}.layers.{{n}}", f"{stack}.block.{{n}}.layer"
    attention, cross, mlp = f"{theirs}.0.SelfAttention", f"{theirs}.1.EncDecAttention", 1 + (stack == "decoder")
    first = tuple(f"{theirs}.{mlp}.DenseReluDense.{name}.weight" for name in (("wi_0", "wi_1") if gated else ("wi",)))
    crossing = (
        Row(f"{ours}.pre_cross_attn_layernorm.weight", (f"{theirs}.1.layer_norm.weight",)),
        Row(f"{ours}.cross_attention.linear_q.weight", (f"{cross}.q.weight",)),
        Row(f"{ours}.cross_attention.linear_kv.weight", (f"{cross}.k.weight", f"{cross}.v.weight"), KeyValue()),
        Row(f"{ours}.cross_attention.linear_proj.weight", (f"{cross}.o.weight",)),
    )
    return (
        Row(f"{stack}_positions.weight", (f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",)),
        Row(f"{ours}.input_layernorm.weight", (f"{theirs}.0.layer_norm.weight",)),
        Row(
            f"{ours}.self_attention.linear_qkv.weight",
            tuple(f"{attention}.{letter}.weight" for letter in "qkv"),
            QueryKeyValue(),
        ),
        Row(f"{ours}.self_attention.linear_proj.weight", (f"{attention}.o.weight",)),
        *(crossing if stack == "decoder" else ()),
        Row(f"{ours}.pre_mlp_layernorm.weight", (f"{theirs}.{mlp}.layer_norm.weight",)),
        Row(f"{ours}.mlp.linear_fc1.weight", first, Stacked(2) if gated else Same()),
        Row(f"{ours}.mlp.linear_fc2.weight", (f"{theirs}.{mlp}.DenseReluDense.wo.weight",)),
        Row(f"{stack}.final_layernorm.weight", (f"{stack}.final_layer_norm.weight",)),
    )


def _rows(*, gated: bool) -> tuple[Row, ...]:
    return (
        Row("embedding.word_embeddings.weight", ("shared.weight",)),
        *_stack("encoder", gated=gated),
        *_stack("decoder", gated=gated),
        Row("output_layer.weight", ("lm_head.weight",)),
    )


T5, GATED_T5 = _rows(gated=False), _rows(gated=True)


class T5Format(HuggingFaceFormat):
    """The original and v1.1."""

    model_types = ("t5",)
    kinds: Mapping[str, Any] = {
        **dict.fromkeys(("num_layers", "num_decoder_layers"), Layers),
        **dict.fromkeys(("d_model", "d_ff"), Width),
        **dict.fromkeys(("relative_attention_num_buckets", "relative_attention_max_distance"), Width),
        **dict.fromkeys(("num_heads", "d_kv"), Heads),
        "n_positions": Count,
        "dropout_rate": Rate,
        "layer_norm_epsilon": Small,
        **dict.fromkeys(("is_gated_act", "scale_decoder_outputs"), bool),
        **dict.fromkeys(("feed_forward_proj", "dense_act_fn"), str),
    }
    unused = (".EncDecAttention.relative_attention_bias.weight",)  # a table that T5 never read
    tied_copies = ("lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")

    def defaults(self, model_type: str) -> Mapping[str, Any]:
        """The original's."""
        return _DEFAULTS

    def model_from_config(self, known: Known, model_type: str) -> ModelConfig:
        """The encoder's architecture."""
        return ModelConfig(
            num_layers=known("num_layers"),
            hidden_size=known("d_model"),
            num_attention_heads=known("num_heads"),
            kv_channels=known("d_kv"),
            ffn_hidden_size=known("d_ff"),
            max_position_embeddings=known("n_positions"),
            vocab_size=known("vocab_size"),
            position_embedding_type="relative",
            softmax_scale=1.0,
            normalization="RMSNorm",
            norm_epsilon=known("layer_norm_epsilon"),
            add_bias_linear=False,
            untie_embeddings_and_output_weights=not _is_scaled(known),
            attention_dropout=known("dropout_rate"),
            hidden_dropout=known("dropout_rate"),
            activation=_activation(known),
        )

    def groups_from_config(self, known: Known, tensors: Collection[str], *, where: str) -> tuple[object, ...]:
        """The decoder and the relative positions."""
        if not any(name.startswith("decoder.") for name in tensors):
            raise CheckpointError(
                f"{where} holds a T5 of an encoder alone (T5EncoderModel), but a T5 here also has a decoder: convert "
                "the T5ForConditionalGeneration that it was taken from"
            )
        group = T5Config(
            decoder_num_layers=known.get("num_decoder_layers") or known("num_layers"),
            relative_attention_num_buckets=known("relative_attention_num_buckets"),
            relative_attention_max_distance=known("relative_attention_max_distance"),
            scale_output=_is_scaled(known),
        )
        return (group,)

    def config_from_model(self, model: ModelConfig, groups: Sequence[object], source: Json) -> dict[str, Any]:
        """Type, class and sizes. ``initializer_range`` is left out: it is a factor on numbers of T5's own."""
        group = group_among(groups, T5Config)
        wrong = _not_t5(model, group)
        if wrong:
            raise CheckpointError(f"Hugging Face has no T5 of this architecture: {'; '.join(wrong)}")
        activation = {"gelu_tanh": "gelu_new"}.get(model.non_linearity, model.non_linearity)
        # "gated-gelu" is what all files of v1.1 say
        plain = "gelu" if model.activation in ("geglu", "geglu_tanh") else activation
        return {
            "architectures": ["T5ForConditionalGeneration"],
            "model_type": "t5",
            "is_encoder_decoder": True,
            "num_layers": model.num_layers,
            "num_decoder_layers": group.decoder_num_layers,
            "d_model": model.hidden_size,
            "num_heads": model.num_attention_heads,
            "d_kv": model.kv_channels,
            "d_ff": model.ffn_hidden_size,
            "n_positions": model.max_position_embeddings,
            "relative_attention_num_buckets": group.relative_attention_num_buckets,
            "relative_attention_max_distance": group.relative_attention_max_distance,
            "feed_forward_proj": f"gated-{plain}" if model.gated else plain,
            "dense_act_fn": activation,
            "is_gated_act": model.gated,
            "layer_norm_epsilon": model.norm_epsilon,
            "dropout_rate": model.hidden_dropout,
            "scale_decoder_outputs": group.scale_output,
        }

    def table(self, model_type: str, model: ModelConfig) -> Sequence[Row]:
        """By the kind of MLP."""
        return GATED_T5 if model.gated else T5

    def prefix(self, model_type: str) -> str:
        """The bare model has the same names."""
        return ""

    def complete(self, model: ModelConfig, tensors: dict[str, LazyTensor]) -> ModelConfig:
        """Word embeddings may have the encoder's name; without an output layer, as transformers 5 saves a v1.1 that it
        made, the output is tied.
        """
        if "shared.weight" not in tensors and "encoder.embed_tokens.weight" in tensors:
            tensors["shared.weight"] = tensors["encoder.embed_tokens.weight"]
        if "lm_head.weight" in tensors:
            return model
        return dataclasses.replace(model, untie_embeddings_and_output_weights=False)

    def special_tokens(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """The original's decoder begins with padding."""
        begin = tokenizer.pad if tokenizer.bos is None else tokenizer.bos
        return {"eos_token_id": tokenizer.eos, "decoder_start_token_id": begin}


FORMAT = T5Format()


def _is_scaled(known: Known) -> bool:
    return bool(known.get("scale_decoder_outputs", known.get("tie_word_embeddings") is not False))


def _activation(known: Known) -> Activation:
    """As transformers reads it: ``dense_act_fn`` and ``is_gated_act`` go before ``feed_forward_proj``."""
    words = str(known("feed_forward_proj")).split("-")
    gated = bool(known.get("is_gated_act", words[0] == "gated"))
    usual = "gelu_new" if words == ["gated", "gelu"] else words[-1]
    name = known.get("dense_act_fn", usual)
    if name in GELUS:
        exact = GELUS[name] == "gelu"
        return ("geglu" if exact else "geglu_tanh") if gated else GELUS[name]
    if (name, gated) == ("silu", True):
        return "swiglu"
    if (name, gated) == ("relu", False):
        return "relu"
    raise known.refuse("feed_forward_proj", "this project has relu, gated-silu, and gelu and gelu_new, gated or not")


def _not_t5(model: ModelConfig, group: T5Config) -> list[str]:
    wrong = {
        "positions are not relative": model.position_embedding_type != "relative",
        "norms are not RMSNorm": model.normalization != "RMSNorm",
        "norm weights are stored with one subtracted": model.apply_layernorm_1p,
        "the residuals branch off after the norms": model.apply_residual_connection_post_layernorm,
        "linear layers have biases": model.add_bias_linear or model.add_qkv_bias,
        "the MLP is squared ReLU": model.activation == "squared_relu",
        "keys and values are shared by heads": model.num_query_groups != model.num_attention_heads,
        "queries and keys are normalized": model.qk_layernorm,
        "scores are scaled (--softmax-scale 1 is not given)": model.softmax_scale != 1.0,
        "the output is scaled and not tied": group.scale_output and model.untie_embeddings_and_output_weights,
    }
    return [reason for reason, holds in wrong.items() if holds]
