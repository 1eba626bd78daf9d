"""``config.json`` of Hugging Face's T5, the original and v1.1, which differ in the MLP and in the output.

The original's output is the word embeddings', given hidden states scaled by 1 / sqrt(hidden size); v1.1 has an output
of its own, unscaled. transformers 4 says both with ``tie_word_embeddings``; 5 says the scale with
``scale_decoder_outputs`` and unties where the files hold an ``lm_head`` that differs, whatever the settings say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from typing_extensions import override

from megatron.config.activation import Activation
from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig
from megatron.core.conversion.bounds import Layers, Width
from megatron.core.conversion.huggingface.config_reader import GELUS, ConfigReader
from megatron.core.conversion.huggingface.format import HuggingFaceFormat, ModelType
from megatron.core.conversion.portable import LazyTensor
from megatron.core.conversion.tables import Row
from megatron.core.conversion.transforms import KEY_VALUE, QUERY_KEY_VALUE, stacked
from megatron.core.models.t5.config import T5Config
from megatron.core.tokenizers.base import Tokenizer
from megatron.errors import CheckpointError, enumeration


def _stack(stack: str, *, gated: bool) -> tuple[Row, ...]:
    """Rows of the encoder or the decoder; of its layers' parts the MLP is the last, cross-attention between."""
    ours, theirs = f"{stack}.layers.{{n}}", f"{stack}.block.{{n}}.layer"
    attention, cross, mlp = f"{theirs}.0.SelfAttention", f"{theirs}.1.EncDecAttention", 1 + (stack == "decoder")
    dense = f"{theirs}.{mlp}.DenseReluDense"
    crossing = (
        Row(f"{ours}.pre_cross_attn_layernorm", f"{theirs}.1.layer_norm"),
        Row(f"{ours}.cross_attention.linear_q", f"{cross}.q"),
        Row(f"{ours}.cross_attention.linear_kv", (f"{cross}.k", f"{cross}.v"), KEY_VALUE),
        Row(f"{ours}.cross_attention.linear_proj", f"{cross}.o"),
    )
    return (
        Row(f"{stack}_positions", f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias"),
        Row(f"{ours}.input_layernorm", f"{theirs}.0.layer_norm"),
        Row(f"{ours}.self_attention.linear_qkv", tuple(f"{attention}.{name}" for name in "qkv"), QUERY_KEY_VALUE),
        Row(f"{ours}.self_attention.linear_proj", f"{attention}.o"),
        *(crossing if stack == "decoder" else ()),
        Row(f"{ours}.pre_mlp_layernorm", f"{theirs}.{mlp}.layer_norm"),
        Row(f"{ours}.mlp.linear_fc1", (f"{dense}.wi_0", f"{dense}.wi_1"), stacked(2))
        if gated
        else Row(f"{ours}.mlp.linear_fc1", f"{dense}.wi"),
        Row(f"{ours}.mlp.linear_fc2", f"{dense}.wo"),
        Row(f"{stack}.final_layernorm", f"{stack}.final_layer_norm"),
    )


def _rows(*, gated: bool) -> tuple[Row, ...]:
    return (
        Row("embedding.word_embeddings", "shared"),
        *_stack("encoder", gated=gated),
        *_stack("decoder", gated=gated),
        Row("output_layer", "lm_head"),
    )


# Ours by their name of the non-linearity, and whether the MLP is gated.
_ACTIVATIONS: dict[tuple[str, bool], Activation] = {
    ("relu", False): "relu",
    ("silu", True): "swiglu",
    **{(name, False): ours for name, ours in GELUS.items()},
    **{(name, True): "geglu" if ours == "gelu" else "geglu_tanh" for name, ours in GELUS.items()},
}
GATED_TABLE = _rows(gated=True)


def _read(reader: ConfigReader) -> dict[str, Any]:
    """The output, and the MLP: ``dense_act_fn`` and ``is_gated_act`` go before ``feed_forward_proj``, as in
    transformers.
    """
    words = str(reader("feed_forward_proj")).split("-")
    gated = bool(reader.get("is_gated_act", words[0] == "gated"))
    usual = "gelu_new" if words == ["gated", "gelu"] else words[-1]
    name = reader.get("dense_act_fn", usual)
    activation = _ACTIVATIONS.get((name, gated))
    if activation is None:
        said = "is_gated_act" if gated != (words[0] == "gated") else "feed_forward_proj"
        available = enumeration(each for each, has_gate in _ACTIVATIONS if has_gate == gated)
        advice = f"{'with' if gated else 'without'} a gate this project has {available}"
        raise reader.refuse(said if name == usual else "dense_act_fn", advice)
    return {"activation": activation, "untie_embeddings_and_output_weights": not _is_scaled(reader)}


def _written(model: ModelConfig) -> dict[str, Any]:
    """The MLP, and the one rate of dropout."""
    activation = next(name for (name, _), ours in _ACTIVATIONS.items() if ours == model.activation)
    # "gated-gelu" is what all files of v1.1 say
    plain = "gelu" if model.activation in ("geglu", "geglu_tanh") else activation
    return {
        "feed_forward_proj": f"gated-{plain}" if model.gated else plain,
        "dense_act_fn": activation,
        "is_gated_act": model.gated,
        "dropout_rate": model.hidden_dropout,
    }


T5 = ModelType(
    architecture="T5ForConditionalGeneration",
    table=_rows(gated=False),
    settings={
        "num_layers": "num_layers",
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "kv_channels": "d_kv",
        "ffn_hidden_size": "d_ff",
        "max_position_embeddings": "n_positions",
        "vocab_size": "vocab_size",
        "norm_epsilon": "layer_norm_epsilon",
        "attention_dropout": "dropout_rate",
        "hidden_dropout": "dropout_rate",
    },
    by_code=("activation",),
    fixed={
        "position_embedding_type": "relative",
        "softmax_scale": 1.0,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
    },
    written={"is_encoder_decoder": True},
    defaults={
        "feed_forward_proj": "relu",
        "n_positions": 512,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
        "dropout_rate": 0.1,
        "layer_norm_epsilon": 1e-6,
    },
    kinds={
        "num_decoder_layers": Layers,
        **dict.fromkeys(("relative_attention_num_buckets", "relative_attention_max_distance"), Width),
        **dict.fromkeys(("is_gated_act", "scale_decoder_outputs"), bool),
        **dict.fromkeys(("feed_forward_proj", "dense_act_fn"), str),
    },
    read=_read,
    write=_written,
    refuse=lambda model: ["the MLP is squared ReLU"] if model.activation == "squared_relu" else [],
    prefix="",
    unused=(".EncDecAttention.relative_attention_bias.weight",),  # a table that T5 never read
    tied_copies=("lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
    about=(
        "the original T5 (ReLU, scaled and tied output), v1.1 and Flan (gated GELU, an output layer), UL2 (gated SiLU)"
    ),
    example="google/flan-t5-small",
)


MT5 = dataclasses.replace(
    T5,
    architecture="MT5ForConditionalGeneration",
    defaults={**T5.defaults, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    # Settings say nothing true about the tie: 5 writes true for every model; ``complete`` looks for an output layer.
    read=lambda reader: {**_read(reader), "untie_embeddings_and_output_weights": True},
    about="mT5, as T5 v1.1",
    example="google/mt5-small",
)


class T5Format(HuggingFaceFormat):
    """The original, v1.1 and mT5. ``initializer_range`` is not written: it is a factor on numbers of T5's own."""

    types: Mapping[str, ModelType] = {"t5": T5, "mt5": MT5}

    @override
    def settings_of_groups(self, groups: Sequence[object], model_type: str, model: ModelConfig) -> dict[str, Any]:
        """The decoder, the relative positions and the scale of the output."""
        group = T5Config.among(groups)
        return {
            **({"scale_decoder_outputs": group.scale_output} if model_type == "t5" else {}),
            "num_decoder_layers": group.decoder_num_layers,
            "relative_attention_num_buckets": group.relative_attention_num_buckets,
            "relative_attention_max_distance": group.relative_attention_max_distance,
        }

    @override
    def differences(self, model_type: str, model: ModelConfig, groups: Sequence[object]) -> list[str]:
        """Experts, and an output that no T5 has."""
        if MoEConfig.among(groups).has_experts:
            return ["it has experts"]
        if not T5Config.among(groups).scale_output:
            return []
        if model_type == "mt5":
            return ["the output is scaled (--scale-output is given)"]
        return ["the output is scaled and not tied"] if model.untie_embeddings_and_output_weights else []

    @override
    def groups_from_config(self, reader: ConfigReader, tensors: Collection[str], *, where: str) -> tuple[object, ...]:
        """The decoder and the relative positions."""
        if not any(name.startswith("decoder.") for name in tensors):
            raise CheckpointError(
                f"{where} holds a T5 of an encoder alone (T5EncoderModel), but a T5 here also has a decoder: convert "
                "the T5ForConditionalGeneration that it was taken from"
            )
        group = T5Config(
            decoder_num_layers=reader.get("num_decoder_layers") or reader("num_layers"),
            relative_attention_num_buckets=reader("relative_attention_num_buckets"),
            relative_attention_max_distance=reader("relative_attention_max_distance"),
            scale_output=reader("model_type") == "t5" and _is_scaled(reader),
        )
        return (group,)

    @override
    def table(self, model_type: str, model: ModelConfig, groups: Sequence[object] = ()) -> Sequence[Row]:
        """Rows of the model's modules, with a gated MLP or a plain one."""
        return GATED_TABLE if model.gated else T5.table

    @override
    def complete(self, model: ModelConfig, tensors: dict[str, LazyTensor]) -> ModelConfig:
        """Word embeddings may have the encoder's name; without an output layer, as transformers 5 saves a v1.1 that it
        made, the output is tied.
        """
        if "shared.weight" not in tensors and "encoder.embed_tokens.weight" in tensors:
            tensors["shared.weight"] = tensors["encoder.embed_tokens.weight"]
        if "lm_head.weight" in tensors:
            return model
        return dataclasses.replace(model, untie_embeddings_and_output_weights=False)

    @override
    def special_tokens(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """The decoder begins as the tokenizer's folder says, the original's with padding."""
        usual = tokenizer.pad if tokenizer.bos is None else tokenizer.bos
        begin = getattr(tokenizer, "decoder_start", None)
        return {"eos_token_id": tokenizer.eos, "decoder_start_token_id": usual if begin is None else begin}


FORMAT = T5Format()


def _is_scaled(reader: ConfigReader) -> bool:
    return bool(reader.get("scale_decoder_outputs", reader.get("tie_word_embeddings") is not False))
