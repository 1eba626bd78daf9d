"""Settings of a ``config.json``, read one by one; for what can't be converted the error names file and value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from megatron.config.model import ModelConfig
from megatron.core.conversion.bounds import Count, Heads, Layers, Small, Width
from megatron.errors import CheckpointError
from megatron.small_files import check_kinds

Json = Mapping[str, Any]
Gelu = Literal["gelu", "gelu_tanh"]
GELUS: dict[str, Gelu] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
}
"""Their names of GELU, and ours."""

KINDS: dict[str, Any] = {
    "model_type": str,
    "num_hidden_layers": Layers,
    "num_attention_heads": Heads,
    **dict.fromkeys(("hidden_size", "intermediate_size"), Width),
    **dict.fromkeys(("vocab_size", "max_position_embeddings"), Count),
    "hidden_act": str,
    "initializer_range": Small,
    "tie_word_embeddings": bool,
}
"""Settings that models of several families have, each with its type and with bounds beyond any model's."""


class Known:
    """Settings with their defaults, and errors that name the file; raises CheckpointError for one of another type.

    ``kinds``: types of all settings that may be asked for.
    """

    def __init__(self, config: Json, defaults: Json, where: str, *, kinds: Mapping[str, Any]) -> None:
        check_kinds(config, kinds, where=where, error=CheckpointError)
        self._values = {**defaults, **config}
        self._where, self._kinds = where, kinds

    def __call__(self, name: str) -> Any:
        """A setting that the architecture needs; CheckpointError where it is missing."""
        if self.get(name) is None:
            raise CheckpointError(f"{self._where} lacks {name}, which the architecture needs")
        return self._values[name]

    def get(self, name: str, default: Any = None) -> Any:
        """A setting, or ``default``."""
        assert name in self._kinds, f"the format reads {name}, and its kinds lack it"
        return self._values.get(name, default)

    def within(self, *names: str) -> Known:
        """The settings of these objects together, the later before the earlier."""
        inside = {key: value for name in names for key, value in (self.get(name) or {}).items()}
        return Known(inside, {}, f"{self._where}: {names[-1]}", kinds=self._kinds)

    def refuse(self, name: str, advice: str) -> CheckpointError:
        """The error for a setting that can't be converted."""
        return CheckpointError(f"{self._where} says {name} = {self.get(name)!r}: {advice}")

    def expect(self, **values: Any) -> None:
        """Raise CheckpointError for a setting that is there and is not the one value that can be converted."""
        for name, value in values.items():
            if self.get(name, value) not in (value, None):
                raise self.refuse(name, f"this project supports only {value!r}")

    def gelu(self, name: str) -> Gelu:
        """Which GELU the activation ``name`` is; CheckpointError when it is none."""
        if self(name) not in GELUS:
            raise self.refuse(name, f"this project has {' and '.join(GELUS)}")
        return GELUS[self(name)]


def not_original(model: ModelConfig) -> list[str]:
    """Differences from the layers of the first transformers: learned positions, LayerNorm, GELU, biases."""
    wrong = {
        "positions are not learned": model.position_embedding_type != "learned_absolute",
        "norms are not LayerNorm": model.normalization != "LayerNorm",
        "norm weights are stored with one subtracted": model.apply_layernorm_1p,
        "the MLP is not plain GELU": model.activation not in ("gelu", "gelu_tanh"),
        "linear layers have no biases": not model.add_bias_linear,
        "keys and values are shared by heads": model.num_query_groups != model.num_attention_heads,
        "queries and keys are normalized": model.qk_layernorm,
        "attention scores have another scale": model.softmax_scale is not None,
        "heads are not hidden size / heads wide": model.kv_channels * model.num_attention_heads != model.hidden_size,
    }
    return [reason for reason, holds in wrong.items() if holds]
