"""OPT: ReLU, and learned positions whose table has two rows before position 0.

OPT 350M has its norms after sublayers, the first of them none before it, and narrower word embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.config.model import ModelConfig
from megatron.core.conversion.bounds import Width
from megatron.core.conversion.huggingface.biases import even_biases
from megatron.core.conversion.huggingface.config_reader import UNGATED, ConfigReader
from megatron.core.conversion.huggingface.format import USUAL_SETTINGS, ModelType
from megatron.core.conversion.tables import Row
from megatron.core.conversion.transforms import QUERY_KEY_VALUE

OURS, THEIRS = "decoder.layers.{n}", "model.decoder.layers.{n}"


def _read(reader: ConfigReader) -> dict[str, Any]:
    width, pre_norm = reader.get("word_embed_proj_dim"), bool(reader("do_layer_norm_before"))
    if pre_norm:
        reader.expect(_remove_final_layer_norm=False)
    has_weights = reader("layer_norm_elementwise_affine")
    return {
        "word_embedding_size": None if width == reader("hidden_size") else width,
        "apply_residual_connection_post_layernorm": not pre_norm,
        "first_attention_norm": pre_norm,
        "norm_parameters": "weight_and_bias" if has_weights else "none",
    }


def _post_norms(model: ModelConfig) -> Sequence[Row]:
    """The norm at the end of a layer of theirs is the one at the start of our next."""
    if not model.apply_residual_connection_post_layernorm:
        return ()
    before, last = (f"model.decoder.layers.{{{which}}}.final_layer_norm" for which in ("before", "last"))
    return (
        Row(f"{OURS}.input_layernorm", before),
        Row(f"{OURS}.pre_mlp_layernorm", f"{THEIRS}.self_attn_layer_norm"),
        Row("decoder.final_layernorm", last),
    )


def _refuse(model: ModelConfig) -> list[str]:
    wrong = ["norms have a weight and no bias"] if model.norm_parameters == "weight" else []
    if model.apply_residual_connection_post_layernorm == model.first_attention_norm:
        first = "a" if model.first_attention_norm else "no"
        wrong.append(f"there is {first} norm before the first attention, and norms are not before sublayers alone")
    return wrong


OPT = ModelType(
    architecture="OPTForCausalLM",
    table=(
        Row("embedding.word_embeddings", "model.decoder.embed_tokens"),
        Row("embedding.projection", "model.decoder.project_in"),
        Row("output_projection", "model.decoder.project_out"),
        Row("embedding.position_embeddings", "model.decoder.embed_positions"),
        Row(f"{OURS}.input_layernorm", f"{THEIRS}.self_attn_layer_norm"),
        Row(
            f"{OURS}.self_attention.linear_qkv",
            tuple(f"{THEIRS}.self_attn.{letter}_proj" for letter in "qkv"),
            QUERY_KEY_VALUE,
        ),
        Row(f"{OURS}.self_attention.linear_proj", f"{THEIRS}.self_attn.out_proj"),
        Row(f"{OURS}.pre_mlp_layernorm", f"{THEIRS}.final_layer_norm"),
        Row(f"{OURS}.mlp.linear_fc1", f"{THEIRS}.fc1"),
        Row(f"{OURS}.mlp.linear_fc2", f"{THEIRS}.fc2"),
        Row("decoder.final_layernorm", "model.decoder.final_layer_norm"),
        Row("output_layer", "lm_head"),
    ),
    settings={
        **USUAL_SETTINGS,
        "ffn_hidden_size": "ffn_dim",
        "hidden_dropout": "dropout",
        "init_method_std": "init_std",
    },
    activation="activation_function",
    activations=UNGATED,
    rows=_post_norms,
    features=(even_biases("enable_bias", default=True),),
    by_code=(
        "norm_parameters",
        "word_embedding_size",
        "apply_residual_connection_post_layernorm",
        "first_attention_norm",
    ),
    fixed={"position_embedding_offset": 2},
    expected={"layerdrop": 0.0},
    defaults={
        "activation_function": "relu",
        "do_layer_norm_before": True,
        "ffn_dim": 3072,
        "max_position_embeddings": 2048,
        "attention_dropout": 0.0,
        "dropout": 0.1,
        "init_std": 0.02,
        "layer_norm_elementwise_affine": True,
    },
    kinds={
        **dict.fromkeys(("do_layer_norm_before", "_remove_final_layer_norm", "layer_norm_elementwise_affine"), bool),
        "layerdrop": float,
        "word_embed_proj_dim": Width,
    },
    read=_read,
    write=lambda model: {
        "layer_norm_elementwise_affine": model.norm_parameters != "none",
        "word_embed_proj_dim": model.word_width,
        "do_layer_norm_before": not model.apply_residual_connection_post_layernorm,
    },
    refuse=_refuse,
    tied_copies=("lm_head.weight",),
    unused=(".version",),
    about="OPT 125M to 66B, 350M (norms after sublayers, narrower word embeddings) among them; tied or not",
    example="facebook/opt-125m",
)
TYPES = {"opt": OPT}
