"""Settings of a ``config.json``, read one by one; for what can't be converted the error names file and value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from megatron.config.model import ModelConfig
from megatron.core.conversion.bounds import Count, Factor, Heads, Layers, Rate, Small, Width
from megatron.errors import CheckpointError
from megatron.small_files import Between, check_kinds

Json = Mapping[str, Any]
ACTIVATIONS = {"gelu_new": False, "gelu_pytorch_tanh": False, "gelu_fast": False, "gelu": True}
"""Their names of GELU, and whether each is the exact one."""

KINDS: dict[str, Any] = {
    **dict.fromkeys(("n_layer", "num_layers", "num_hidden_layers", "num_decoder_layers"), Layers),
    **dict.fromkeys(("n_embd", "hidden_size", "d_model", "n_inner", "intermediate_size", "d_ff"), Width),
    **dict.fromkeys(("n_head", "num_heads", "num_attention_heads", "num_key_value_heads", "head_dim", "d_kv"), Heads),
    **dict.fromkeys(("n_positions", "max_position_embeddings", "vocab_size", "type_vocab_size"), Count),
    **dict.fromkeys(("relative_attention_num_buckets", "relative_attention_max_distance"), Width),
    **dict.fromkeys(("resid_pdrop", "attn_pdrop", "attention_dropout", "dropout_rate"), Rate),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), Rate),
    **dict.fromkeys(("layer_norm_epsilon", "layer_norm_eps", "rms_norm_eps", "initializer_range"), Small),
    **dict.fromkeys(("rope_theta", "factor", "partial_rotary_factor"), Factor),
    **dict.fromkeys(("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window"), bool),
    **dict.fromkeys(("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "add_cross_attention"), bool),
    **dict.fromkeys(("is_decoder", "is_gated_act", "scale_decoder_outputs"), bool),
    **dict.fromkeys(("model_type", "hidden_act", "activation_function", "position_embedding_type"), str),
    **dict.fromkeys(("feed_forward_proj", "dense_act_fn", "rope_type", "type"), str),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), dict[str, Any]),
    "sliding_window": Annotated[int, Between(0, 1 << 31)],
}
"""Every setting that is read, with its type and with bounds beyond any model's."""


class Known:
    """Settings with their defaults, and errors that name the file; raises CheckpointError for one of another type."""

    def __init__(self, config: Json, defaults: Json, where: str) -> None:
        check_kinds(config, KINDS, where=where, error=CheckpointError)
        self._values = {**defaults, **config}
        self._where = where

    def __call__(self, name: str) -> Any:
        """A setting that the architecture needs; CheckpointError where it is missing."""
        if self._values.get(name) is None:
            raise CheckpointError(f"{self._where} lacks {name}, which the architecture needs")
        return self._values[name]

    def get(self, name: str, default: Any = None) -> Any:
        """A setting, or ``default``."""
        return self._values.get(name, default)

    def within(self, *names: str) -> Known:
        """The settings of these objects together, the later before the earlier."""
        return Known(
            {k: v for name in names for k, v in (self.get(name) or {}).items()}, {}, f"{self._where}: {names[-1]}"
        )

    def refuse(self, name: str, advice: str) -> CheckpointError:
        """The error for a setting that can't be converted."""
        return CheckpointError(f"{self._where} says {name} = {self.get(name)!r}: {advice}")

    def expect(self, **values: Any) -> None:
        """Raise CheckpointError for a setting that is there and is not the one value that can be converted."""
        for name, value in values.items():
            if self.get(name, value) not in (value, None):
                raise self.refuse(name, f"this project has that only as {value!r}")

    def exact_gelu(self, name: str) -> bool:
        """Whether the activation ``name`` is the exact GELU; CheckpointError when it is none."""
        if self(name) not in ACTIVATIONS:
            raise self.refuse(name, f"this project has {' and '.join(ACTIVATIONS)}")
        return ACTIVATIONS[self(name)]


def not_original(model: ModelConfig) -> list[str]:
    """Differences from the layers of the first transformers: learned positions, LayerNorm, GELU, biases."""
    wrong = {
        "positions are not learned": model.position_embedding_type != "learned_absolute",
        "norms are not LayerNorm": model.normalization != "LayerNorm",
        "norm weights are stored minus one": model.apply_layernorm_1p,
        "the MLP is not plain GELU": model.gated or model.relu or model.squared_relu,
        "linear layers have no biases": not model.add_bias_linear,
        "keys and values are shared by heads": model.num_query_groups != model.num_attention_heads,
        "queries and keys are normed": model.qk_layernorm,
        "scores have a scale of their own": model.softmax_scale is not None,
        "heads are not hidden size / heads wide": model.kv_channels * model.num_attention_heads != model.hidden_size,
    }
    return [reason for reason, holds in wrong.items() if holds]
