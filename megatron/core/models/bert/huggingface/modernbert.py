"""ModernBERT: rotary positions, windows on both sides of a token, and norms before sublayers.

The first attention has no norm of its own: it reads the norm of the embedding.
"""

from __future__ import annotations

from typing import Any

from megatron.config.model import ModelConfig
from megatron.core.conversion.bounds import Count, Factor, Layers
from megatron.core.conversion.huggingface import two_rotaries, windows
from megatron.core.conversion.huggingface.biases import BIASES
from megatron.core.conversion.huggingface.config_reader import ConfigReader
from megatron.core.conversion.huggingface.format import USUAL_SETTINGS, ModelType
from megatron.core.conversion.huggingface.rotary import KINDS
from megatron.core.conversion.tables import Row
from megatron.core.conversion.transforms import FUSED_QUERY_KEY_VALUE

OURS, THEIRS = "encoder.layers.{n}", "model.layers.{n}"
_EVERY = "global_attn_every_n_layers"
_LOCAL, _BASES = "local_attention", {"rope_theta": "global_rope_theta", "rope_local_base_freq": "local_rope_theta"}


def _read(reader: ConfigReader) -> dict[str, Any]:
    """``local_attention`` counts the positions on both sides; without ``layer_types`` layers 0, N, 2N… have full
    attention.
    """
    side, every = reader(_LOCAL) // 2, reader(_EVERY)
    if reader.get("sliding_window") not in (None, side):
        raise reader.refuse("sliding_window", f"{_LOCAL} = {reader(_LOCAL)} means {side}, and transformers reads both")
    usual = [layer % every != 0 for layer in range(reader("num_hidden_layers"))]
    layers = windows.read_layer_types(reader.but(sliding_window=side + 1), usual=usual)
    has_windows = layers["window_size"] is not None
    bases = reader.but(**{today: reader(theirs) for today, theirs in _BASES.items()})
    return {
        **two_rotaries.read_rotaries(bases, has_windows=has_windows),
        **layers,
        "window_size": (side, side) if has_windows else None,
        "norm_parameters": "weight_and_bias" if reader("norm_bias") else "weight",
    }


def _written(model: ModelConfig) -> dict[str, Any]:
    rotaries = two_rotaries.written_rotaries(model)
    types = windows.written_layer_types(model)["layer_types"]
    full = [layer for layer, name in enumerate(types) if name == "full_attention"]
    every = full[1] if len(full) > 1 else len(types)
    return {
        **{theirs: rotaries[today] for today, theirs in _BASES.items()},
        **({_LOCAL: 2 * model.window_size[0]} if model.window_size else {}),
        **({_EVERY: every} if full == [*range(0, len(types), every)] else {}),  # transformers before 5 reads this
        "rope_parameters": rotaries["rope_parameters"],
        "layer_types": types,
        "norm_bias": model.norm_parameters == "weight_and_bias",
    }


def _refused(model: ModelConfig) -> list[str]:
    found = two_rotaries.scaled_windows(model)
    if model.norm_parameters == "none":
        found.append("norms have no weights")
    if model.window_size and model.window_size[0] != model.window_size[1]:
        found.append("windows are not as long before a token as after it")
    return found


MODERNBERT = ModelType(
    architecture="ModernBert",
    table=(
        Row("embedding.word_embeddings", "model.embeddings.tok_embeddings"),
        Row("embedding.norm", "model.embeddings.norm"),
        Row(f"{OURS}.input_layernorm", f"{THEIRS}.attn_norm"),
        Row(f"{OURS}.self_attention.linear_qkv", f"{THEIRS}.attn.Wqkv", FUSED_QUERY_KEY_VALUE),
        Row(f"{OURS}.self_attention.linear_proj", f"{THEIRS}.attn.Wo"),
        Row(f"{OURS}.pre_mlp_layernorm", f"{THEIRS}.mlp_norm"),
        Row(f"{OURS}.mlp.linear_fc1", f"{THEIRS}.mlp.Wi"),
        Row(f"{OURS}.mlp.linear_fc2", f"{THEIRS}.mlp.Wo"),
        Row("encoder.final_layernorm", "model.final_norm"),
        Row("lm_head.dense", "head.dense"),
        Row("lm_head.layer_norm", "head.norm"),
        Row("output_layer", "decoder"),
    ),
    settings={**USUAL_SETTINGS, "norm_epsilon": "norm_eps", "hidden_dropout": "embedding_dropout"},
    activation="hidden_activation",
    activations={
        "gelu": "geglu",
        **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "geglu_tanh"),
        "silu": "swiglu",
    },
    features=(BIASES,),
    by_code=(*two_rotaries.FIELDS, *windows.FIELDS, "norm_parameters"),
    fixed={"position_embedding_type": "rope", "embedding_norm": True, "first_attention_norm": False},
    expected={"classifier_activation": "gelu", "decoder_bias": True, "rope_scaling": None},
    written={"classifier_activation": "gelu", "decoder_bias": True},
    defaults={
        "hidden_activation": "gelu",
        "max_position_embeddings": 8192,
        "norm_eps": 1e-5,
        "norm_bias": False,
        "initializer_range": 0.02,
        "attention_dropout": 0.0,
        "embedding_dropout": 0.0,
        "classifier_bias": False,
        "tie_word_embeddings": True,
        "global_rope_theta": 160000.0,
        "local_rope_theta": 10000.0,
        _LOCAL: 128,
        _EVERY: 3,
    },
    kinds={
        **KINDS,
        **windows.KINDS,
        **two_rotaries.KINDS,
        **dict.fromkeys(("norm_bias", "classifier_bias", "decoder_bias"), bool),
        **dict.fromkeys(_BASES.values(), Factor),
        "classifier_activation": str,
        _LOCAL: Count,
        _EVERY: Layers,
    },
    read=_read,
    write=_written,
    refuse=_refused,
    prefix="model.",
    heads=("decoder.", "head."),
    tied_copies=("decoder.weight",),
    about=(
        "ModernBERT, mmBERT and Ettin's encoders, here with --bert-no-binary-head --num-tokentypes 0; windows in any "
        "layers; biases in attention, MLP, norms and head, each or none; linear, Llama 3 and YaRN scaling of layers "
        "without a window; tied or not"
    ),
    example="answerdotai/ModernBERT-base",
)
TYPES = {"modernbert": MODERNBERT}
