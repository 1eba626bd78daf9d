"""How each layer of a model turns its heads."""

from __future__ import annotations

from typing import Any

from megatron.config.model import ModelConfig
from megatron.core.ops.rotary import Rotary
from megatron.core.ops.rotary_scaling import Linear
from megatron.core.transformer.positions import rotary_of


def model(no_rope_freq: str | None, **more: Any) -> ModelConfig:
    return ModelConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        position_embedding_type="rope",
        rotary_seq_len_interpolation_factor=8.0,
        window_size=(3, 0),
        window_attn_skip_freq="2",
        no_rope_freq=no_rope_freq,
        **more,
    )


def test_layers_turn_their_heads_as_their_kind_does() -> None:
    """Gemma 3 scales its global layers only, and its layers with a window have another base; others leave some out."""
    config, scaled = model("[0,0,1,0]", rotary_base_local=100.0), Rotary(8, scaling=Linear(factor=8.0))
    assert [rotary_of(config, layer) for layer in range(4)] == [Rotary(8, 100.0), scaled, None, scaled]
    assert [rotary_of(model(None), layer) for layer in range(4)] == [scaled] * 4


def test_two_spellings_of_a_pattern_are_one_architecture() -> None:
    """A checkpoint of --no-rope-freq 4 was of another architecture than a run with the same layers in a list."""
    assert model("4") == model("[0]*3+[1]") == model("[0,0,0,1]")
    assert all(model("4").of_depth(2).has_rotary(layer) for layer in range(2))
