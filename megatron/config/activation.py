"""The activation of the MLP, with a gate or without."""

from __future__ import annotations

from typing import Literal, cast

from megatron.config.flags import Settings, architecture_flag

Activation = Literal[
    "gelu_tanh", "gelu", "quick_gelu", "relu", "squared_relu", "swiglu", "geglu_tanh", "geglu", "quick_geglu"
]
Nonlinearity = Literal["gelu_tanh", "gelu", "quick_gelu", "silu", "relu", "squared_relu"]

_GATES: dict[str, Nonlinearity] = {
    "swiglu": "silu",
    "geglu_tanh": "gelu_tanh",
    "geglu": "gelu",
    "quick_geglu": "quick_gelu",
}


class ActivationConfig(Settings):
    """Settings of the activation, part of those of the model."""

    activation: Activation = architecture_flag(
        "Activation of the MLP. gelu uses the error function, gelu_tanh its tanh approximation, quick_gelu "
        "that by a sigmoid; swiglu, geglu, geglu_tanh and quick_geglu have a gate.",
        default="gelu_tanh",
        short_forms={
            "--swiglu": "swiglu",
            "--geglu": "geglu_tanh",
            "--quick-geglu": "quick_geglu",
            "--relu": "relu",
            "--squared-relu": "squared_relu",
            "--exact-gelu": "gelu",
        },
        combined={frozenset({"geglu_tanh", "gelu"}): "geglu"},
    )
    activation_func_clamp_value: float | None = architecture_flag(
        "Clamp the gate of a gated MLP to at most this, and its linear part to plus or minus this (7 in "
        "arXiv:2508.10925).",
        default=None,
        above=0,
    )
    glu_linear_offset: float = architecture_flag(
        "Add this to the linear part of a gated MLP before it is multiplied by the gate (1 in arXiv:2508.10925).",
        default=0.0,
    )

    @property
    def nonlinearity(self) -> Nonlinearity:
        """What ``activation`` applies to each element; to the gate when ``gated``."""
        return _GATES.get(self.activation) or cast(Nonlinearity, self.activation)

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate: its first matmul is then twice as wide."""
        return self.activation in _GATES
