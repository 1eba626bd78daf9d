"""SmolLM 3: Llama with layers without rotary positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from megatron.config.layer_patterns import pattern_of
from megatron.config.model import ModelConfig
from megatron.core.conversion.huggingface.format import ModelType
from megatron.core.conversion.huggingface.known import Known
from megatron.core.conversion.huggingface.windows import (
    FIELDS,
    KINDS,
    is_used,
    read_layer_types,
    without_later_keys,
    written_layer_types,
)
from megatron.core.models.gpt.huggingface.llama import LLAMA
from megatron.small_files import Between

_LAYERS, _INTERVAL = "no_rope_layers", "no_rope_layer_interval"


def _read(known: Known) -> dict[str, Any]:
    """``no_rope_layers`` has a 1 for each layer with rotary positions; without it every fourth layer has none."""
    count, interval, listed = known("num_hidden_layers"), known(_INTERVAL), known.get(_LAYERS)
    if listed is not None and len(listed) < count:
        raise known.refuse(_LAYERS, f"it must have a 0 or 1 for each of the {count} layers")
    rotary = [bool(each) for each in listed[:count]] if listed else [(n + 1) % interval != 0 for n in range(count)]
    used = is_used(known)
    return {
        **read_layer_types(known, usual=[used and not each for each in rotary]),
        "no_rope_freq": pattern_of(tuple(not each for each in rotary)),
    }


def _write(model: ModelConfig) -> dict[str, Any]:
    return {
        **written_layer_types(model),
        "use_sliding_window": model.window_size is not None,
        _LAYERS: [int(model.has_rotary(layer)) for layer in range(model.num_layers)],
    }


SMOLLM3 = replace(
    LLAMA,
    architecture="SmolLM3ForCausalLM",
    by_code=(*FIELDS, "no_rope_freq"),
    defaults={
        **LLAMA.defaults,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "rope_theta": 2000000.0,
        _INTERVAL: 4,
    },
    kinds={
        **KINDS,
        _LAYERS: list[Annotated[int, Between(0, 1)]],
        _INTERVAL: Annotated[int, Between(1, 100_000)],
    },
    read=_read,
    write=_write,
    refuse=without_later_keys,
    about="SmolLM 3: any layers without rotary positions or with sliding windows; tied or not",
    example="HuggingFaceTB/SmolLM3-3B",
)
TYPES: dict[str, ModelType] = {"smollm3": SMOLLM3}
