"""Published decoder models: GPT-2, and Llama with those that share its names (Mistral, Qwen 2 and 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from megatron.config.model import ModelConfig
from megatron.core.conversion.bounds import Count, Factor, Heads, Layers, Rate, Small, Width
from megatron.core.conversion.huggingface.format import HuggingFaceFormat
from megatron.core.conversion.huggingface.known import Json, Known, not_original
from megatron.core.conversion.tables import Row
from megatron.core.conversion.transforms import PerHead, QueryKeyValue, Same, Stacked, ThirdsOf, Transposed
from megatron.errors import CheckpointError
from megatron.small_files import Between

LAYER = "decoder.layers.{n}"

GPT2 = (
    Row("embedding.word_embeddings.weight", ("transformer.wte.weight",)),
    Row("embedding.position_embeddings.weight", ("transformer.wpe.weight",)),
    Row(f"{LAYER}.input_layernorm.weight", ("transformer.h.{n}.ln_1.weight",)),
    Row(f"{LAYER}.input_layernorm.bias", ("transformer.h.{n}.ln_1.bias",)),
    Row(f"{LAYER}.self_attention.linear_qkv.weight", ("transformer.h.{n}.attn.c_attn.weight",), ThirdsOf(Transposed())),
    Row(f"{LAYER}.self_attention.linear_qkv.bias", ("transformer.h.{n}.attn.c_attn.bias",), ThirdsOf(Same())),
    Row(f"{LAYER}.self_attention.linear_proj.weight", ("transformer.h.{n}.attn.c_proj.weight",), Transposed()),
    Row(f"{LAYER}.self_attention.linear_proj.bias", ("transformer.h.{n}.attn.c_proj.bias",)),
    Row(f"{LAYER}.pre_mlp_layernorm.weight", ("transformer.h.{n}.ln_2.weight",)),
    Row(f"{LAYER}.pre_mlp_layernorm.bias", ("transformer.h.{n}.ln_2.bias",)),
    Row(f"{LAYER}.mlp.linear_fc1.weight", ("transformer.h.{n}.mlp.c_fc.weight",), Transposed()),
    Row(f"{LAYER}.mlp.linear_fc1.bias", ("transformer.h.{n}.mlp.c_fc.bias",)),
    Row(f"{LAYER}.mlp.linear_fc2.weight", ("transformer.h.{n}.mlp.c_proj.weight",), Transposed()),
    Row(f"{LAYER}.mlp.linear_fc2.bias", ("transformer.h.{n}.mlp.c_proj.bias",)),
    Row("decoder.final_layernorm.weight", ("transformer.ln_f.weight",)),
    Row("decoder.final_layernorm.bias", ("transformer.ln_f.bias",)),
    Row("output_layer.weight", ("lm_head.weight",)),
)


def _three(kind: str) -> tuple[str, ...]:
    return tuple(f"model.layers.{{n}}.self_attn.{letter}_proj.{kind}" for letter in "qkv")


def _gate_and_up(kind: str) -> tuple[str, ...]:
    return tuple(f"model.layers.{{n}}.mlp.{name}_proj.{kind}" for name in ("gate", "up"))


# Llama's names are those of Mistral and Qwen too. Biases and query/key norms are rows that most of them don't have.
LLAMA = (
    Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",)),
    Row(f"{LAYER}.input_layernorm.weight", ("model.layers.{n}.input_layernorm.weight",)),
    Row(f"{LAYER}.self_attention.linear_qkv.weight", _three("weight"), QueryKeyValue()),
    Row(f"{LAYER}.self_attention.linear_qkv.bias", _three("bias"), QueryKeyValue()),
    Row(f"{LAYER}.self_attention.q_layernorm.weight", ("model.layers.{n}.self_attn.q_norm.weight",), PerHead()),
    Row(f"{LAYER}.self_attention.k_layernorm.weight", ("model.layers.{n}.self_attn.k_norm.weight",), PerHead()),
    Row(f"{LAYER}.self_attention.linear_proj.weight", ("model.layers.{n}.self_attn.o_proj.weight",)),
    Row(f"{LAYER}.self_attention.linear_proj.bias", ("model.layers.{n}.self_attn.o_proj.bias",)),
    Row(f"{LAYER}.pre_mlp_layernorm.weight", ("model.layers.{n}.post_attention_layernorm.weight",)),
    Row(f"{LAYER}.mlp.linear_fc1.weight", _gate_and_up("weight"), Stacked(2)),
    Row(f"{LAYER}.mlp.linear_fc1.bias", _gate_and_up("bias"), Stacked(2)),
    Row(f"{LAYER}.mlp.linear_fc2.weight", ("model.layers.{n}.mlp.down_proj.weight",)),
    Row(f"{LAYER}.mlp.linear_fc2.bias", ("model.layers.{n}.mlp.down_proj.bias",)),
    Row("decoder.final_layernorm.weight", ("model.norm.weight",)),
    Row("output_layer.weight", ("lm_head.weight",)),
)

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
}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


_KINDS: dict[str, Any] = {
    "n_layer": Layers,
    **dict.fromkeys(("n_embd", "n_inner"), Width),
    **dict.fromkeys(("n_head", "num_key_value_heads", "head_dim"), Heads),
    "n_positions": Count,
    **dict.fromkeys(("resid_pdrop", "attn_pdrop", "attention_dropout"), Rate),
    **dict.fromkeys(("layer_norm_epsilon", "rms_norm_eps"), Small),
    **dict.fromkeys(("rope_theta", "factor", "partial_rotary_factor"), Factor),
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_sliding_window"), bool),
    **dict.fromkeys(("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "add_cross_attention"), bool),
    **dict.fromkeys(("activation_function", "rope_type", "type"), str),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), dict[str, Any]),
    "sliding_window": Annotated[int, Between(0, 1 << 31)],
    **dict.fromkeys(_LLAMA3, float),
}


class DecoderFormat(HuggingFaceFormat):
    """GPT-2 and the Llama-like models."""

    model_types = tuple(_CLASSES)
    kinds = _KINDS
    unused = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
    tied_copies = ("lm_head.weight",)

    def defaults(self, model_type: str) -> Mapping[str, Any]:
        """By model type."""
        return _DEFAULTS[model_type]

    def model_from_config(self, known: Known, model_type: str) -> ModelConfig:
        """The architecture."""
        return _gpt2_model(known) if model_type == "gpt2" else _llama_model(known, model_type)

    def config_from_model(self, model: ModelConfig, groups: Sequence[object], source: Json) -> dict[str, Any]:
        """The source's own type where two have the same architecture."""
        model_type = type_of(model, source)
        sizes = _gpt2_config(model) if model_type == "gpt2" else _llama_config(model, model_type)
        return {"architectures": [_CLASSES[model_type]], "model_type": model_type, **sizes}

    def table(self, model_type: str, model: ModelConfig) -> Sequence[Row]:
        """GPT-2's or Llama's."""
        return GPT2 if model_type == "gpt2" else LLAMA

    def prefix(self, model_type: str) -> str:
        """GPT-2 calls its body a transformer."""
        return "transformer." if model_type == "gpt2" else "model."


FORMAT = DecoderFormat()


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
        activation=known.gelu("activation_function"),
        untie_embeddings_and_output_weights=not known("tie_word_embeddings"),
        attention_dropout=known("attn_pdrop"),
        hidden_dropout=known("resid_pdrop"),
        init_method_std=known("initializer_range"),
    )


def _llama_model(known: Known, model_type: str) -> ModelConfig:
    known.expect(hidden_act="silu")
    _refuse_sliding_window(known, model_type)
    # Qwen2's query, key and value always have biases and its output never; the others have all four or none.
    biases = model_type != "qwen2" and bool(known("attention_bias"))
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
        activation="swiglu",
        add_bias_linear=biases,
        add_qkv_bias=model_type == "qwen2",
        qk_layernorm=model_type == "qwen3",
        untie_embeddings_and_output_weights=not known("tie_word_embeddings"),
        attention_dropout=known("attention_dropout"),
        hidden_dropout=0.0,
        init_method_std=known("initializer_range"),
        position_embedding_type="rope",
        **_rotary_settings(known),
    )


def _refuse_sliding_window(known: Known, model_type: str) -> None:
    """Attention over a window only equals full attention as long as no sequence is longer than the window."""
    window = known.get("sliding_window")
    used = model_type == "mistral" or bool(known.get("use_sliding_window", False))
    if model_type in ("mistral", "qwen2", "qwen3") and used and window and window < known("max_position_embeddings"):
        raise known.refuse(
            "sliding_window",
            f"sequences of up to max_position_embeddings = {known('max_position_embeddings')} would need attention "
            "over a sliding window, which is not available yet. If your sequences are never longer than the window, "
            f'write "max_position_embeddings": {window} into the file: attention is full up to that length',
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
            raise known.refuse("rope_parameters", f"llama3 scaling is available with {_LLAMA3} only, not with {other}")
        settings |= {"use_rope_scaling": True, "rope_scaling_factor": float(rope("factor"))}
    elif kind != "default":
        raise known.refuse(
            "rope_parameters", f"rotary scaling {kind!r} is not available; default, linear and llama3 are"
        )
    return settings


def type_of(model: ModelConfig, source: Json) -> str:
    """The model type of a decoder model; ``source``'s own where two have the same architecture."""
    faults = {"gpt2": _not_gpt2(model), "llama": _not_llama(model)}
    if not faults["gpt2"]:
        return "gpt2"
    if faults["llama"]:
        raise CheckpointError(
            f"no Hugging Face model type has this architecture: it is not a GPT-2 ({'; '.join(faults['gpt2'])}) and "
            f"not a Llama, Mistral or Qwen ({'; '.join(faults['llama'])})"
        )
    if model.qk_layernorm:
        return "qwen3"
    if model.add_qkv_bias and not model.add_bias_linear:
        return "qwen2"
    return "mistral" if source.get("model_type") == "mistral" and not model.add_bias_linear else "llama"


def _not_gpt2(model: ModelConfig) -> list[str]:
    moved = ["the residuals branch off after the norms"] if model.apply_residual_connection_post_layernorm else []
    return not_original(model) + moved


def _not_llama(model: ModelConfig) -> list[str]:
    wrong = {
        "positions are not rotary": model.position_embedding_type != "rope",
        "only a part of each head is rotated": model.rotary_percent != 1.0,
        "norms are not RMSNorm": model.normalization != "RMSNorm",
        "the MLP is not SwiGLU": model.activation != "swiglu",
        "norm weights are stored with one subtracted": model.apply_layernorm_1p,
        "the residuals branch off after the norms": model.apply_residual_connection_post_layernorm,
        "attention scores have another scale": model.softmax_scale is not None,
        "queries and keys are normalized and layers have biases": model.qk_layernorm and model.add_qkv_bias,
    }
    return [reason for reason, holds in wrong.items() if holds]


def _gpt2_config(model: ModelConfig) -> dict[str, Any]:
    return {
        "n_layer": model.num_layers,
        "n_embd": model.hidden_size,
        "n_head": model.num_attention_heads,
        "n_inner": model.ffn_hidden_size,
        "n_positions": model.max_position_embeddings,
        "activation_function": "gelu" if model.activation == "gelu" else "gelu_new",
        "layer_norm_epsilon": model.norm_epsilon,
        "attn_pdrop": model.attention_dropout,
        "embd_pdrop": model.hidden_dropout,
        "resid_pdrop": model.hidden_dropout,
        "initializer_range": model.init_method_std,
    }


def _llama_config(model: ModelConfig, model_type: str) -> dict[str, Any]:
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
        "initializer_range": model.init_method_std,
        **({"sliding_window": None} if model_type == "mistral" else {}),
        **(biases if model_type == "llama" else {}),
        **({"attention_bias": False} if model_type == "qwen3" else {}),
    }
