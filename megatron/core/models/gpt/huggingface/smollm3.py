"""SmolLM 3: Llama with layers without rotary positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from megatron.config.layer_patterns import pattern_of
from megatron.core.conversion.huggingface.config_reader import ConfigReader
from megatron.core.conversion.huggingface.format import ModelType
from megatron.core.conversion.huggingface.windows import is_used, windows_where, written_on_request
from megatron.core.models.gpt.huggingface.llama import LLAMA
from megatron.small_files import Between

_LAYERS, _INTERVAL = "no_rope_layers", "no_rope_layer_interval"


def _rotary_layers(reader: ConfigReader) -> list[bool]:
    """``no_rope_layers`` has a 1 for each layer with rotary positions; without it every fourth layer has none."""
    count, interval, listed = reader("num_hidden_layers"), reader(_INTERVAL), reader.get(_LAYERS)
    if listed is not None and len(listed) < count:
        raise reader.refuse(_LAYERS, f"it must have a 0 or 1 for each of the {count} layers")
    return [bool(each) for each in listed[:count]] if listed else [(n + 1) % interval != 0 for n in range(count)]


def _usual_windows(reader: ConfigReader) -> list[bool]:
    used = is_used(reader)
    return [used and not each for each in _rotary_layers(reader)]


SMOLLM3 = replace(
    LLAMA,
    architecture="SmolLM3ForCausalLM",
    features=(*LLAMA.features, windows_where(_usual_windows, write=written_on_request)),
    by_code=("no_rope_freq",),
    defaults={
        **LLAMA.defaults,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "rope_theta": 2000000.0,
        _INTERVAL: 4,
    },
    kinds={_LAYERS: list[Annotated[int, Between(0, 1)]], _INTERVAL: Annotated[int, Between(1, 100_000)]},
    read=lambda reader: {"no_rope_freq": pattern_of(tuple(not each for each in _rotary_layers(reader)))},
    write=lambda model: {_LAYERS: [int(model.has_rotary(layer)) for layer in range(model.num_layers)]},
    about="SmolLM 3: any layers without rotary positions or with sliding windows; tied or not",
    example="HuggingFaceTB/SmolLM3-3B",
)
TYPES: dict[str, ModelType] = {"smollm3": SMOLLM3}
