"""Rotary positions of types whose layers with a window have a base of their own and are never scaled.

They are in ``rope_parameters`` by type of layer (transformers 5), or in the settings of full attention beside
``rope_local_base_freq`` (4).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron.config.model import ModelConfig
from megatron.core.conversion.bounds import Factor
from megatron.core.conversion.huggingface.config_reader import ConfigReader, Feature
from megatron.core.conversion.huggingface.rotary import FIELDS as ONE
from megatron.core.conversion.huggingface.rotary import ROTARY, read_rotary, written_rotary
from megatron.core.conversion.huggingface.windows import windows_where, written_beside_full

FIELDS = (*ONE, "rotary_base_local")
"""Fields of our architecture that ``read_rotaries`` makes."""

_FULL, _WINDOW = "full_attention", "sliding_attention"
KINDS: dict[str, Any] = {
    **dict.fromkeys((_FULL, _WINDOW), dict[str, Any]),
    "rope_local_base_freq": Factor,
}
"""Types of the settings that are asked for, beside those of ``read_rotary``."""

_SCALINGS = ("default", "linear", "llama3", "yarn")


def read_rotaries(reader: ConfigReader, *, has_windows: bool) -> dict[str, Any]:
    """The settings ``FIELDS``; without ``rope_local_base_freq`` the base of windows is that of the other layers."""
    parts = reader.within("rope_parameters")
    full, window = parts.get(_FULL), parts.within(_WINDOW)
    scaling = reader.within("rope_scaling")
    if full is None and scaling.get("type") and not scaling.get("rope_type"):
        raise scaling.refuse("type", "transformers does not read it in models of this type: call it rope_type")
    found = read_rotary(reader if full is None else reader.but(rope_parameters=full), kinds=_SCALINGS)
    if not found.get("yarn_correction_range_round_to_int", True) and full is not None:
        raise parts.within(_FULL).refuse("truncate", "transformers does not read it there, and rounds")
    if window.get("rope_type", "default") != "default":
        raise window.refuse("rope_type", "layers with a window are not scaled in this project")
    older = reader.get("rope_local_base_freq")
    local = float(window.get("rope_theta") or older or found["rotary_base"])
    is_same = local == found["rotary_base"] and found.keys() <= {"rotary_base", "rotary_percent"}
    return {**found, "rotary_base_local": local if has_windows and not is_same else None}


def written_rotaries(model: ModelConfig) -> dict[str, Any]:
    """The settings from our architecture, as transformers 4 and 5 read them."""
    whole, local = written_rotary(model), model.rotary_base_local or model.rotary_base
    full = {"rope_type": "default", "rope_theta": model.rotary_base, **(whole["rope_scaling"] or {})}
    parts = {_FULL: full, _WINDOW: {"rope_type": "default", "rope_theta": local}}
    return {**whole, "rope_local_base_freq": local, "rope_parameters": parts}


def scaled_windows(model: ModelConfig) -> list[str]:
    """Why a model isn't one of these."""
    kind, scaling = model.position_embedding_type, written_rotary(model)["rope_scaling"]
    if kind == "yarn" and not model.yarn_correction_range_round_to_int:
        return ["the range of channels that YaRN corrects is not rounded"]
    if kind in ("dynamic_ntk", "longrope"):
        return [f"rotary scaling is {kind}"]
    if scaling is not None and model.window_size is not None and model.rotary_base_local is None:
        return ["rotary positions of layers with a window are scaled (--rotary-base-local is not given)"]
    return []


def windows_and_rotaries(usual: Callable[[ConfigReader], Sequence[bool]], **defaults: int) -> Feature:
    """Windows in some layers, see ``windows_where``, and the rotary positions of both kinds of layers."""
    windows = windows_where(usual, write=written_beside_full, **defaults)

    def read(reader: ConfigReader) -> dict[str, Any]:
        layers = windows.read(reader)
        return {**layers, **read_rotaries(reader, has_windows=layers["window_size"] is not None)}

    return Feature(
        by_code=(*windows.by_code, *FIELDS),
        defaults={**windows.defaults, **ROTARY.defaults},
        kinds={**windows.kinds, **ROTARY.kinds, **KINDS},
        read=read,
        write=lambda model: {**written_rotaries(model), **windows.write(model)},
        refuse=lambda model: [*windows.refuse(model), *scaled_windows(model)],
    )
