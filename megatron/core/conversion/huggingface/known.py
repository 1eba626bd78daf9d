"""Settings of a ``config.json``, read one by one; for what can't be converted the error names file and value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.config.model import ModelConfig
from megatron.errors import CheckpointError

Json = Mapping[str, Any]
ACTIVATIONS = {"gelu_new": False, "gelu_pytorch_tanh": False, "gelu_fast": False, "gelu": True}
"""Their names of GELU, and whether each is the exact one."""


class Known:
    """Settings with their defaults, and errors that name the file."""

    def __init__(self, config: Json, defaults: Json, where: str) -> None:
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
    """What keeps a model from having the layers that GPT-2 and BERT share."""
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
