"""Published decoder models: GPT-2, and Llama with those that share its names (Mistral, Qwen 2 and 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from megatron.config.model import ModelConfig
from megatron.core.conversion.bounds import Factor
from megatron.core.conversion.huggingface.format import HuggingFaceFormat, ModelType, common_reasons
from megatron.core.conversion.huggingface.known import GELUS, Known
from megatron.core.conversion.tables import Row
from megatron.core.conversion.transforms import PER_HEAD, QUERY_KEY_VALUE, TRANSPOSED, TRANSPOSED_THIRDS, stacked
from megatron.small_files import Between

OURS, IN_GPT2, IN_LLAMA = "decoder.layers.{n}", "transformer.h.{n}", "model.layers.{n}"

GPT2 = ModelType(
    architecture="GPT2LMHeadModel",
    table=(
        Row("embedding.word_embeddings", "transformer.wte"),
        Row("embedding.position_embeddings", "transformer.wpe"),
        Row(f"{OURS}.input_layernorm", f"{IN_GPT2}.ln_1"),
        Row(f"{OURS}.self_attention.linear_qkv", f"{IN_GPT2}.attn.c_attn", TRANSPOSED_THIRDS),
        Row(f"{OURS}.self_attention.linear_proj", f"{IN_GPT2}.attn.c_proj", TRANSPOSED),
        Row(f"{OURS}.pre_mlp_layernorm", f"{IN_GPT2}.ln_2"),
        Row(f"{OURS}.mlp.linear_fc1", f"{IN_GPT2}.mlp.c_fc", TRANSPOSED),
        Row(f"{OURS}.mlp.linear_fc2", f"{IN_GPT2}.mlp.c_proj", TRANSPOSED),
        Row("decoder.final_layernorm", "transformer.ln_f"),
        Row("output_layer", "lm_head"),
    ),
    settings={
        "num_layers": "n_layer",
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "ffn_hidden_size": "n_inner",
        "max_position_embeddings": "n_positions",
        "vocab_size": "vocab_size",
        "norm_epsilon": "layer_norm_epsilon",
        "attention_dropout": "attn_pdrop",
        "hidden_dropout": "resid_pdrop",
        "init_method_std": "initializer_range",
    },
    optional=("n_inner",),
    activation="activation_function",
    activations=GELUS,
    expected={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    defaults={
        "activation_function": "gelu_new",
        "n_positions": 1024,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "resid_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "initializer_range": 0.02,
    },
    prefix="transformer.",
)

_ROTARY = ("rotary_base", "rotary_seq_len_interpolation_factor", "use_rope_scaling", "rope_scaling_factor")
LLAMA = ModelType(
    architecture="LlamaForCausalLM",
    table=(
        Row("embedding.word_embeddings", "model.embed_tokens"),
        Row(f"{OURS}.input_layernorm", f"{IN_LLAMA}.input_layernorm"),
        Row(
            f"{OURS}.self_attention.linear_qkv",
            tuple(f"{IN_LLAMA}.self_attn.{letter}_proj" for letter in "qkv"),
            QUERY_KEY_VALUE,
        ),
        Row(f"{OURS}.self_attention.q_layernorm", f"{IN_LLAMA}.self_attn.q_norm", PER_HEAD),
        Row(f"{OURS}.self_attention.k_layernorm", f"{IN_LLAMA}.self_attn.k_norm", PER_HEAD),
        Row(f"{OURS}.self_attention.linear_proj", f"{IN_LLAMA}.self_attn.o_proj"),
        Row(f"{OURS}.pre_mlp_layernorm", f"{IN_LLAMA}.post_attention_layernorm"),
        Row(f"{OURS}.mlp.linear_fc1", (f"{IN_LLAMA}.mlp.gate_proj", f"{IN_LLAMA}.mlp.up_proj"), stacked(2)),
        Row(f"{OURS}.mlp.linear_fc2", f"{IN_LLAMA}.mlp.down_proj"),
        Row("decoder.final_layernorm", "model.norm"),
        Row("output_layer", "lm_head"),
    ),
    settings={
        "num_layers": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "num_attention_heads": "num_attention_heads",
        "num_query_groups": "num_key_value_heads",
        "kv_channels": "head_dim",
        "ffn_hidden_size": "intermediate_size",
        "max_position_embeddings": "max_position_embeddings",
        "vocab_size": "vocab_size",
        "norm_epsilon": "rms_norm_eps",
        "attention_dropout": "attention_dropout",
        "init_method_std": "initializer_range",
    },
    optional=("num_key_value_heads", "head_dim"),
    activation="hidden_act",
    activations={"silu": "swiglu"},
    by_code=("group_query_attention", "add_bias_linear", *_ROTARY),
    fixed={"position_embedding_type": "rope", "normalization": "RMSNorm", "hidden_dropout": 0.0},
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": 10000.0,
    },
)


def _like_llama(architecture: str, *, defaults: Mapping[str, Any], **more: Any) -> ModelType:
    """A type with Llama's names and no biases, and ``more`` fixed fields."""
    fixed = {**LLAMA.fixed, "add_bias_linear": False, **more}
    return replace(LLAMA, architecture=architecture, defaults={**LLAMA.defaults, **defaults}, fixed=fixed)


_QWEN = {"max_position_embeddings": 32768, "sliding_window": 4096}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class DecoderFormat(HuggingFaceFormat):
    """GPT-2 and the Llama-like models."""

    types: Mapping[str, ModelType] = {
        "gpt2": GPT2,
        "llama": LLAMA,
        "mistral": _like_llama(
            "MistralForCausalLM",
            defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        ),
        "qwen2": _like_llama("Qwen2ForCausalLM", defaults=_QWEN, add_qkv_bias=True),
        "qwen3": _like_llama("Qwen3ForCausalLM", defaults={**_QWEN, "head_dim": 128}, qk_layernorm=True),
    }
    kinds: Mapping[str, Any] = {
        **dict.fromkeys(("rope_theta", "factor", "partial_rotary_factor"), Factor),
        **dict.fromkeys(("attention_bias", "mlp_bias", "use_sliding_window"), bool),
        **dict.fromkeys(("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "add_cross_attention"), bool),
        **dict.fromkeys(("rope_type", "type"), str),
        **dict.fromkeys(("rope_scaling", "rope_parameters"), dict[str, Any]),
        "sliding_window": Annotated[int, Between(0, 1 << 31)],
        **dict.fromkeys(_LLAMA3, float),
    }
    unused = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
    tied_copies = ("lm_head.weight",)

    def fields(self, known: Known, model_type: str) -> dict[str, Any]:
        """Biases and rotary positions."""
        if model_type == "gpt2":
            return {}
        _refuse_sliding_window(known, model_type)
        # Qwen2's query, key and value always have biases and its output never; the others have all four or none.
        biases = model_type != "qwen2" and bool(known("attention_bias"))
        if biases != bool(known("mlp_bias")):
            name = "attention_bias" if biases else "mlp_bias"
            advice = "this project has biases in all linear layers or in none (or in query, key and value)"
            raise known.refuse(name, advice)
        return {"add_bias_linear": biases, **_rotary_fields(known)}

    def own_settings(self, model: ModelConfig, groups: Sequence[object], model_type: str) -> dict[str, Any]:
        """The opposite."""
        if model_type == "gpt2":
            return {"embd_pdrop": model.hidden_dropout}
        more: dict[str, dict[str, Any]] = {
            "llama": dict.fromkeys(("attention_bias", "mlp_bias"), model.add_bias_linear),
            "mistral": {"sliding_window": None},
            "qwen3": {"attention_bias": False},
        }
        scaling: dict[str, Any] | None = None
        if model.use_rope_scaling:
            scaling = {"rope_type": "llama3", "factor": model.rope_scaling_factor, **_LLAMA3}
        elif model.rotary_seq_len_interpolation_factor is not None:
            scaling = {"rope_type": "linear", "factor": model.rotary_seq_len_interpolation_factor}
        return {"rope_theta": model.rotary_base, "rope_scaling": scaling, **more.get(model_type, {})}

    def differences(self, model: ModelConfig, groups: Sequence[object]) -> list[str]:
        """No type has both of what single ones have."""
        both = model.qk_layernorm and model.add_qkv_bias
        return ["queries and keys are normalized and layers have biases"] if both else []

    def refusal(self, wrong: Mapping[str, list[str]], *, title: str) -> str:
        """With the reasons against GPT-2, and those against all that are like Llama."""
        like_llama = [reasons for name, reasons in wrong.items() if name != "gpt2"]
        return (
            f"no Hugging Face model type has this architecture: it is not a GPT-2 ({'; '.join(wrong['gpt2'])}) and "
            f"not a Llama, Mistral or Qwen ({'; '.join(common_reasons(like_llama))})"
        )


FORMAT = DecoderFormat()


def _refuse_sliding_window(known: Known, model_type: str) -> None:
    """Attention over a window only equals full attention as long as no sequence is longer than the window."""
    window = known.get("sliding_window")
    used = model_type == "mistral" or bool(known.get("use_sliding_window", False))
    if model_type != "llama" and used and window and window < known("max_position_embeddings"):
        raise known.refuse(
            "sliding_window",
            f"sequences of up to max_position_embeddings = {known('max_position_embeddings')} would need attention "
            "over a sliding window, which is not available yet. If your sequences are never longer than the window, "
            f'write "max_position_embeddings": {window} into the file: attention is full up to that length',
        )


def _rotary_fields(known: Known) -> dict[str, Any]:
    """Rotary flags of ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (4)."""
    rope = known.within("rope_scaling", "rope_parameters")
    kind = rope.get("rope_type", rope.get("type", "default"))
    found: dict[str, Any] = {"rotary_base": float(rope.get("rope_theta") or known("rope_theta"))}
    if rope.get("partial_rotary_factor", known.get("partial_rotary_factor", 1.0)) != 1.0:
        raise known.refuse("partial_rotary_factor", "these families rotate whole heads")
    if kind == "linear":
        found["rotary_seq_len_interpolation_factor"] = float(rope("factor"))
    elif kind == "llama3":
        other = {name: rope.get(name) for name, value in _LLAMA3.items() if rope.get(name) != value}
        if other:
            raise known.refuse("rope_parameters", f"llama3 scaling is available with {_LLAMA3} only, not with {other}")
        found |= {"use_rope_scaling": True, "rope_scaling_factor": float(rope("factor"))}
    elif kind != "default":
        raise known.refuse(
            "rope_parameters", f"rotary scaling {kind!r} is not available; default, linear and llama3 are"
        )
    return found
