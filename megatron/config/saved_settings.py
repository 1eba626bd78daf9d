"""Settings saved by earlier versions, in the names of this one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.errors import MegatronError
from megatron.small_files import check_kinds

_SWITCHES = ("swiglu", "geglu", "relu", "squared_relu", "exact_gelu")


def in_current_names(saved: Mapping[str, Any], *, where: str, error: type[MegatronError]) -> dict[str, Any]:
    """Groups of settings as ``RunConfig.to_json`` writes them today. Raises ``error`` for a switch of another type.

    Until 0.1 the model had five switches in place of ``activation``.
    """
    model = saved.get("model")
    if not isinstance(model, Mapping) or model.keys().isdisjoint(_SWITCHES):
        return dict(saved)
    check_kinds(model, dict.fromkeys(_SWITCHES, bool), where=f"{where}: model", error=error)
    exact = model.get("exact_gelu")
    usual = ("geglu" if exact else "geglu_tanh") if model.get("geglu") else "gelu" if exact else "gelu_tanh"
    activation = next((name for name in ("swiglu", "relu", "squared_relu") if model.get(name)), usual)
    kept = {name: value for name, value in model.items() if name not in _SWITCHES}
    return {**saved, "model": {**kept, "activation": activation}}
