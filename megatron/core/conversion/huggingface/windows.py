"""Sliding windows in config.json: their length, and the layers that have one.

``sliding_window`` is a length that includes the query's own position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

from megatron.config.layer_patterns import window_pattern
from megatron.config.model import ModelConfig
from megatron.core.conversion.bounds import Count
from megatron.core.conversion.huggingface.config_reader import ConfigReader, Feature
from megatron.small_files import Between

FIELDS = ("window_size", "window_attn_skip_freq")
"""Fields of our architecture that ``read_layer_types`` makes."""

KINDS: dict[str, Any] = {
    "sliding_window": Count,
    "layer_types": list[str],
    "use_sliding_window": bool,
    "max_window_layers": Annotated[int, Between(0, 100_000)],
}
"""Types of the settings that are asked for."""

_TYPES = {"sliding_attention": True, "full_attention": False}


def read_window(reader: ConfigReader) -> dict[str, Any]:
    """The window of a model in which every layer has it."""
    window = reader.get("sliding_window")
    return {"window_size": None if window is None else (window - 1, 0)}


def read_layer_types(reader: ConfigReader, *, usual: Sequence[bool]) -> dict[str, Any]:
    """The window, and which layers have it: those of ``layer_types``, else those that are True in ``usual``."""
    layers, types, window = tuple(usual), reader.get("layer_types"), reader.get("sliding_window")
    if types is not None:
        if not {*types} <= _TYPES.keys() or len(types) != reader("num_hidden_layers"):
            advice = f"it must name each of the {reader('num_hidden_layers')} layers, as {' or '.join(_TYPES)}"
            raise reader.refuse("layer_types", advice)
        layers = tuple(_TYPES[each] for each in types)
    if not any(layers):
        return {"window_size": None, "window_attn_skip_freq": None}
    if window is None:
        raise reader.refuse("sliding_window", "some layers have a window")
    return {"window_size": (window - 1, 0), "window_attn_skip_freq": window_pattern(layers)}


def written_window(model: ModelConfig) -> dict[str, Any]:
    """``sliding_window`` of a model in which every layer has it, or none."""
    return {"sliding_window": None if model.window_size is None else model.window_size[0] + 1}


def written_layer_types(model: ModelConfig) -> dict[str, Any]:
    """``sliding_window`` and ``layer_types``."""
    names = {has_window: name for name, has_window in _TYPES.items()}
    windows = [model.window_of(layer) is not None for layer in range(model.num_layers)]
    return {**written_window(model), "layer_types": [names[each] for each in windows]}


def written_beside_full(model: ModelConfig) -> dict[str, Any]:
    """``written_layer_types`` for types that need a ``sliding_window`` even where no layer has one: then it stays."""
    found = written_layer_types(model)
    return found if model.window_size else {"layer_types": found["layer_types"]}


def written_on_request(model: ModelConfig) -> dict[str, Any]:
    """``written_layer_types``, and the switch that ``is_used`` reads."""
    return {"use_sliding_window": model.window_size is not None, **written_layer_types(model)}


def without_later_keys(model: ModelConfig) -> list[str]:
    """Why a model isn't one of these: no window of theirs has keys after the query."""
    return ["windows have keys after the query"] if model.window_size and model.window_size[1] else []


def is_used(reader: ConfigReader) -> bool:
    """Whether layers may have windows, which ``use_sliding_window`` says; CheckpointError where some have one that it
    turns off.
    """
    used = bool(reader.get("use_sliding_window")) and reader.get("sliding_window") is not None
    if not used and "sliding_attention" in (reader.get("layer_types") or ()):
        raise reader.refuse("use_sliding_window", "layer_types has layers with a window")
    return used


def every_second(reader: ConfigReader) -> list[bool]:
    """The first, third, … layer: for ``windows_where``."""
    return [layer % 2 == 0 for layer in range(reader("num_hidden_layers"))]


WINDOW = Feature(
    by_code=("window_size",), kinds=KINDS, read=read_window, write=written_window, refuse=without_later_keys
)
"""A window in all layers, or in none."""


def windows_where(
    usual: Callable[[ConfigReader], Sequence[bool]],
    *,
    write: Callable[[ModelConfig], dict[str, Any]] = written_beside_full,
    **defaults: int,
) -> Feature:
    """Windows in some layers: those of ``layer_types``, else those that are True in ``usual``."""
    return Feature(
        by_code=FIELDS,
        defaults=defaults,
        kinds=KINDS,
        read=lambda reader: read_layer_types(reader, usual=usual(reader)),
        write=write,
        refuse=without_later_keys,
    )
