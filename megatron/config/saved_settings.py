"""Settings saved by earlier versions, in the names of this one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def in_current_names(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Groups of settings as ``RunConfig.to_json`` writes them today.

    Until 0.1 the model had five switches, ``swiglu``, ``geglu``, ``relu``, ``squared_relu`` and ``exact_gelu``, in
    place of ``activation``.
    """
    model = saved.get("model")
    if not isinstance(model, Mapping) or "swiglu" not in model:
        return dict(saved)
    exact, switches = model.get("exact_gelu"), ("swiglu", "relu", "squared_relu")
    usual = ("geglu" if exact else "geglu_tanh") if model.get("geglu") else "gelu" if exact else "gelu_tanh"
    activation = next((name for name in switches if model.get(name)), usual)
    kept = {name: value for name, value in model.items() if name not in (*switches, "geglu", "exact_gelu")}
    return {**saved, "model": {**kept, "activation": activation}}
