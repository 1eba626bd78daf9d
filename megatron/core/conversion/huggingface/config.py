"""``config.json`` of a Hugging Face model and our architecture, each from the other; what one can't say is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.config.bert import BertConfig
from megatron.config.model import ModelConfig
from megatron.config.t5 import T5Config
from megatron.core.conversion.huggingface import bert, t5
from megatron.core.conversion.huggingface.known import Json, Known, not_original
from megatron.errors import CheckpointError

FAMILIES = ("gpt2", "llama", "mistral", "qwen2", "qwen3", *bert.FAMILIES, t5.FAMILY)
_CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# What transformers takes for a setting that a config.json leaves out.
_LLAMA_DEFAULTS = {
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_theta": 10000.0,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "activation_function": "gelu_new",
        "n_positions": 1024,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "resid_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "initializer_range": 0.02,
    },
    "llama": _LLAMA_DEFAULTS,
    "mistral": {**_LLAMA_DEFAULTS, "max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {**_LLAMA_DEFAULTS, "max_position_embeddings": 32768, "sliding_window": 4096},
    "qwen3": {**_LLAMA_DEFAULTS, "max_position_embeddings": 32768, "sliding_window": 4096, "head_dim": 128},
    **dict.fromkeys(bert.FAMILIES, bert.DEFAULTS),
    t5.FAMILY: t5.DEFAULTS,
}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def model_from_config(config: Json, *, where: str) -> ModelConfig:
    """The architecture that a config.json describes; CheckpointError for a family or a setting that isn't here.

    ``where``: the file, for messages.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise CheckpointError(
            f"{where} describes a model of type {family!r}; those that can be converted are {', '.join(FAMILIES)}"
        )
    if "quantization_config" in config:
        raise CheckpointError(f"{where} is of quantized weights; convert the model in bf16, fp16 or fp32")
    known = Known(config, _DEFAULTS[str(family)], where)
    if family in bert.FAMILIES:
        return bert.model_from_config(known, family)
    if family == t5.FAMILY:
        return t5.model_from_config(known)
    return _gpt2_model(known) if family == "gpt2" else _llama_model(known, family)


def _gpt2_model(known: Known) -> ModelConfig:
    known.expect(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    return ModelConfig(
        num_layers=known("n_layer"),
        hidden_size=known("n_embd"),
        num_attention_heads=known("n_head"),
        ffn_hidden_size=known.get("n_inner") or 4 * known("n_embd"),
        max_position_embeddings=known("n_positions"),
        vocab_size=known("vocab_size"),
        norm_epsilon=known("layer_norm_epsilon"),
        exact_gelu=known.exact_gelu("activation_function"),
        untie_embeddings_and_output_weights=not known("tie_word_embeddings"),
        attention_dropout=known("attn_pdrop"),
        hidden_dropout=known("resid_pdrop"),
        init_method_std=known("initializer_range"),
    )


def _llama_model(known: Known, family: str) -> ModelConfig:
    known.expect(hidden_act="silu")
    _refuse_sliding_window(known, family)
    # Qwen2's query, key and value always have biases and its output never; the others have all four or none.
    biases = family != "qwen2" and bool(known("attention_bias"))
    if biases != bool(known("mlp_bias")):
        name = "attention_bias" if biases else "mlp_bias"
        raise known.refuse(name, "this project has biases in all linear layers or in none (or in query, key and value)")
    heads = known("num_attention_heads")
    groups = known.get("num_key_value_heads") or heads
    if heads % groups:
        raise known.refuse("num_key_value_heads", f"num_attention_heads = {heads} is not divisible by it")
    return ModelConfig(
        num_layers=known("num_hidden_layers"),
        hidden_size=known("hidden_size"),
        num_attention_heads=heads,
        kv_channels=known.get("head_dim") or known("hidden_size") // heads,
        group_query_attention=groups != heads,
        num_query_groups=groups,
        ffn_hidden_size=known("intermediate_size"),
        max_position_embeddings=known("max_position_embeddings"),
        vocab_size=known("vocab_size"),
        normalization="RMSNorm",
        norm_epsilon=known("rms_norm_eps"),
        swiglu=True,
        add_bias_linear=biases,
        add_qkv_bias=family == "qwen2",
        qk_layernorm=family == "qwen3",
        untie_embeddings_and_output_weights=not known("tie_word_embeddings"),
        attention_dropout=known("attention_dropout"),
        hidden_dropout=0.0,
        init_method_std=known("initializer_range"),
        position_embedding_type="rope",
        **_rotary_settings(known),
    )


def _refuse_sliding_window(known: Known, family: str) -> None:
    """Attention over a window only equals full attention as long as no sequence is longer than the window."""
    window = known.get("sliding_window")
    used = family == "mistral" or bool(known.get("use_sliding_window", False))
    if family in ("mistral", "qwen2", "qwen3") and used and window and window < known("max_position_embeddings"):
        raise known.refuse(
            "sliding_window",
            f"sequences of up to max_position_embeddings = {known('max_position_embeddings')} would need attention "
            "over a sliding window, which this project does not have. If yours are never longer than the window, write "
            f'"max_position_embeddings": {window} into the file: up to there it is full attention',
        )


def _rotary_settings(known: Known) -> dict[str, Any]:
    """Rotary flags of ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (4)."""
    rope = known.within("rope_scaling", "rope_parameters")
    kind = rope.get("rope_type", rope.get("type", "default"))
    settings: dict[str, Any] = {"rotary_base": float(rope.get("rope_theta") or known("rope_theta"))}
    if rope.get("partial_rotary_factor", known.get("partial_rotary_factor", 1.0)) != 1.0:
        raise known.refuse("partial_rotary_factor", "these families rotate whole heads")
    if kind == "linear":
        settings["rotary_seq_len_interpolation_factor"] = float(rope("factor"))
    elif kind == "llama3":
        other = {name: rope.get(name) for name, value in _LLAMA3.items() if rope.get(name) != value}
        if other:
            raise known.refuse("rope_parameters", f"llama3 scaling is here with {_LLAMA3} only, not with {other}")
        settings |= {"use_rope_scaling": True, "rope_scaling_factor": float(rope("factor"))}
    elif kind != "default":
        raise known.refuse("rope_parameters", f"rotary scaling {kind!r} is not here; default, linear and llama3 are")
    return settings


def config_from_model(
    model: ModelConfig, groups: Sequence[object] = (), *, dtype: str, source: Json, tokens: Json
) -> dict[str, Any]:
    """The config.json of a model, with what else stood in the one it came from (``source``, or empty).

    ``groups``: settings of its family alone. ``tokens``: ids of special tokens, where the source has none. Raises
    CheckpointError for an architecture that none of the families has.
    """
    described = _described(model, groups, source)
    family = described["model_type"]
    kept = dict(source) if source.get("model_type") == family else {}
    for dropped in ("rope_parameters", "rope_scaling", "dtype", "torch_dtype", "transformers_version"):
        kept.pop(dropped, None)
    if family == "mistral":
        described["sliding_window"] = None
    if family != t5.FAMILY:  # whose setting is a factor on numbers of its own
        described["initializer_range"] = model.init_method_std
    return {
        **tokens,
        **kept,
        **described,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "vocab_size": model.vocab_size,
        "torch_dtype": dtype,
    }


def _described(model: ModelConfig, groups: Sequence[object], source: Json) -> dict[str, Any]:
    """Family, class and sizes."""
    for group in groups:
        if isinstance(group, BertConfig):
            return bert.config_from_model(model, group)
        if isinstance(group, T5Config):
            return t5.config_from_model(model, group)
    family = family_of(model, source)
    sizes = _gpt2_config(model) if family == "gpt2" else _llama_config(model, family)
    return {"architectures": [_CLASSES[family]], "model_type": family, **sizes}


def family_of(model: ModelConfig, source: Json) -> str:
    """The family a GPT belongs to; ``source``'s own where two have the same architecture."""
    faults = {"gpt2": _not_gpt2(model), "llama": _not_llama(model)}
    if not faults["gpt2"]:
        return "gpt2"
    if faults["llama"]:
        raise CheckpointError(
            "no Hugging Face family that can be written has this architecture: it is no GPT-2 "
            f"({'; '.join(faults['gpt2'])}) and no Llama, Mistral or Qwen ({'; '.join(faults['llama'])})"
        )
    if model.qk_layernorm:
        return "qwen3"
    if model.add_qkv_bias and not model.add_bias_linear:
        return "qwen2"
    return "mistral" if source.get("model_type") == "mistral" and not model.add_bias_linear else "llama"


def _not_gpt2(model: ModelConfig) -> list[str]:
    moved = ["residuals start behind the norms"] if model.apply_residual_connection_post_layernorm else []
    return not_original(model) + moved


def _not_llama(model: ModelConfig) -> list[str]:
    wrong = {
        "positions are not rotary": model.position_embedding_type != "rope",
        "only a part of each head is rotated": model.rotary_percent != 1.0,
        "norms are not RMSNorm": model.normalization != "RMSNorm",
        "the MLP is not SwiGLU": not model.swiglu,
        "norm weights are stored minus one": model.apply_layernorm_1p,
        "residuals start behind the norms": model.apply_residual_connection_post_layernorm,
        "scores have a scale of their own": model.softmax_scale is not None,
        "queries and keys are normed and layers have biases": model.qk_layernorm and model.add_qkv_bias,
    }
    return [reason for reason, holds in wrong.items() if holds]


def _gpt2_config(model: ModelConfig) -> dict[str, Any]:
    return {
        "n_layer": model.num_layers,
        "n_embd": model.hidden_size,
        "n_head": model.num_attention_heads,
        "n_inner": model.ffn_hidden_size,
        "n_positions": model.max_position_embeddings,
        "activation_function": "gelu" if model.exact_gelu else "gelu_new",
        "layer_norm_epsilon": model.norm_epsilon,
        "attn_pdrop": model.attention_dropout,
        "embd_pdrop": model.hidden_dropout,
        "resid_pdrop": model.hidden_dropout,
    }


def _llama_config(model: ModelConfig, family: str) -> dict[str, Any]:
    scaling: dict[str, Any] | None = None
    if model.use_rope_scaling:
        scaling = {"rope_type": "llama3", "factor": model.rope_scaling_factor, **_LLAMA3}
    elif model.rotary_seq_len_interpolation_factor is not None:
        scaling = {"rope_type": "linear", "factor": model.rotary_seq_len_interpolation_factor}
    biases = {"attention_bias": model.add_bias_linear, "mlp_bias": model.add_bias_linear}
    return {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.kv_channels,
        "intermediate_size": model.ffn_hidden_size,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rotary_base,
        "rope_scaling": scaling,
        "attention_dropout": model.attention_dropout,
        **(biases if family == "llama" else {}),
        **({"attention_bias": False} if family == "qwen3" else {}),
    }
