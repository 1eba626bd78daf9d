"""OPT: ReLU, and learned positions whose table has two rows before position 0."""

from __future__ import annotations

from typing import Any

from megatron.core.conversion.huggingface.biases import BIAS_FIELDS, even_biases, partly_biased
from megatron.core.conversion.huggingface.format import ModelType
from megatron.core.conversion.huggingface.known import UNGATED, Known
from megatron.core.conversion.tables import Row
from megatron.core.conversion.transforms import QUERY_KEY_VALUE

OURS, THEIRS = "decoder.layers.{n}", "model.decoder.layers.{n}"


def _read(known: Known) -> dict[str, Any]:
    width = known.get("word_embed_proj_dim")
    if width not in (None, known("hidden_size")):
        advice = "word embeddings of another width than hidden_size (OPT 350M) are not available; the other sizes are"
        raise known.refuse("word_embed_proj_dim", advice)
    has_weights = known("layer_norm_elementwise_affine")
    return {
        "norm_parameters": "weight_and_bias" if has_weights else "none",
        **even_biases(bool(known("enable_bias"))),
    }


OPT = ModelType(
    architecture="OPTForCausalLM",
    table=(
        Row("embedding.word_embeddings", "model.decoder.embed_tokens"),
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
        "num_layers": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "num_attention_heads": "num_attention_heads",
        "ffn_hidden_size": "ffn_dim",
        "max_position_embeddings": "max_position_embeddings",
        "vocab_size": "vocab_size",
        "attention_dropout": "attention_dropout",
        "hidden_dropout": "dropout",
        "init_method_std": "init_std",
    },
    activation="activation_function",
    activations=UNGATED,
    by_code=("norm_parameters", *BIAS_FIELDS),
    fixed={"position_embedding_offset": 2},
    expected={"do_layer_norm_before": True, "_remove_final_layer_norm": False, "layerdrop": 0.0},
    written={"do_layer_norm_before": True},
    defaults={
        "activation_function": "relu",
        "ffn_dim": 3072,
        "max_position_embeddings": 2048,
        "attention_dropout": 0.0,
        "dropout": 0.1,
        "init_std": 0.02,
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
    },
    kinds={
        **dict.fromkeys(("do_layer_norm_before", "_remove_final_layer_norm"), bool),
        **dict.fromkeys(("enable_bias", "layer_norm_elementwise_affine"), bool),
        "layerdrop": float,
        "word_embed_proj_dim": int,
    },
    read=_read,
    write=lambda model: {
        "enable_bias": model.add_bias_linear,
        "layer_norm_elementwise_affine": model.norm_parameters != "none",
        "word_embed_proj_dim": model.hidden_size,
    },
    refuse=lambda model: [
        *partly_biased(model),
        *(["norms have a weight and no bias"] if model.norm_parameters == "weight" else []),
    ],
    tied_copies=("lm_head.weight",),
    unused=(".version",),
    about="OPT 125M to 66B but 350M, whose word embeddings have another width and whose norms come last; tied or not",
    example="facebook/opt-125m",
)
TYPES = {"opt": OPT}
