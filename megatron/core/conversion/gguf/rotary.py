"""Rotary positions in GGUF files: keys, and tensors of factors by which frequencies are divided."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.core.conversion.portable import LazyTensor
from megatron.core.ops.rotary_scaling import Llama3, Scaling, longrope_attention_factor, yarn_attention_factor
from megatron.errors import CheckpointError

FREQS, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
FACTORS = (FREQS, LONG, SHORT)
_SCALING = "rope.scaling"
_LOW, _HIGH = f"{_SCALING}.low_freq_factor", f"{_SCALING}.high_freq_factor"
_LOCAL = "rope.freq_base_swa"
_ORIGINAL = f"{_SCALING}.original_context_length"


def written_rotary(model: ModelConfig) -> dict[str, Any]:
    """Keys of a model's rotary positions; factors are in ``factor_tensors``."""
    found: dict[str, Any] = {"rope.dimension_count": model.rotary_width, "rope.freq_base": model.rotary_base}
    kind, factor = model.position_embedding_type, model.rotary_scaling_factor
    if model.rotary_seq_len_interpolation_factor is not None:
        found |= {f"{_SCALING}.type": "linear", f"{_SCALING}.factor": model.rotary_seq_len_interpolation_factor}
    if model.use_rope_scaling:
        found |= {
            _ORIGINAL: model.original_max_position_embeddings,
            _LOW: model.rope_low_freq_factor,
            _HIGH: model.rope_high_freq_factor,
        }
    wanted = spelled_out(model).rotary_attention_factor or 1.0
    if kind == "yarn":
        usual = yarn_attention_factor(factor)
        found |= {
            f"{_SCALING}.type": "yarn",
            f"{_SCALING}.factor": factor,
            _ORIGINAL: model.original_max_position_embeddings,
            f"{_SCALING}.yarn_beta_fast": model.yarn_beta_fast,
            f"{_SCALING}.yarn_beta_slow": model.yarn_beta_slow,
            **({} if math.isclose(wanted, usual) else {f"{_SCALING}.attn_factor": wanted / usual}),
        }
    if kind == "longrope":
        original = model.original_max_position_embeddings or model.max_position_embeddings
        found |= {f"{_SCALING}.type": "longrope", _ORIGINAL: original, f"{_SCALING}.attn_factor": wanted}
    if model.rotary_base_local is not None:
        found[_LOCAL] = model.rotary_base_local
    return found


def spelled_out(model: ModelConfig) -> ModelConfig:
    """The model with the factor of attention that YaRN or LongRoPE give it, in place of what that follows from."""
    factor, given = model.rotary_scaling_factor, model.rotary_attention_factor
    if model.position_embedding_type == "yarn":
        usual = yarn_attention_factor(factor, mscale=model.mscale, mscale_all_dim=model.mscale_all_dim)
        return replace(model, rotary_attention_factor=given or usual, mscale=1.0, mscale_all_dim=0.0)
    if model.position_embedding_type == "longrope":
        usual = longrope_attention_factor(factor, model.original_max_position_embeddings or 1)
        return replace(model, rotary_attention_factor=given or usual, rotary_scaling_factor=1.0)
    return model


def factor_tensors(model: ModelConfig) -> dict[str, LazyTensor]:
    """Tensors by which llama.cpp divides the frequencies of pairs; none without such scaling."""
    if model.position_embedding_type == "longrope":
        return {LONG: _lazy(model.longrope_long_factors), SHORT: _lazy(model.longrope_short_factors)}
    if model.use_rope_scaling:
        scaled = Llama3(
            factor=model.rope_scaling_factor,
            low=model.rope_low_freq_factor,
            high=model.rope_high_freq_factor,
            original_length=model.original_max_position_embeddings or 8192,
        )
        return {FREQS: _lazy(_plain(model) / scaled.frequencies(model.rotary_width, model.rotary_base, length=1))}
    return {}


def _plain(model: ModelConfig) -> Tensor:
    return Scaling().frequencies(model.rotary_width, model.rotary_base, length=1)


def _lazy(values: Any) -> LazyTensor:
    tensor = torch.as_tensor(values).float()
    return LazyTensor(tuple(tensor.shape), tensor.dtype, lambda: tensor)


def read_rotary(keys: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a model's rotary positions. ``keys``: tensors of factors among them; ``found``: other fields, sizes
    among them.
    """
    width = found.get("kv_channels") or found["hidden_size"] // found["num_attention_heads"]
    turned = keys.get("rope.dimension_count", width)
    fields: dict[str, Any] = {
        "rotary_base": float(keys.get("rope.freq_base", 10000.0)),
        "rotary_percent": turned / width,
    }
    kind, factor = keys.get(f"{_SCALING}.type", "none"), float(keys.get(f"{_SCALING}.factor", 1.0))
    if kind == "linear":
        fields["rotary_seq_len_interpolation_factor"] = factor
    if kind == "yarn":
        more = keys.get(f"{_SCALING}.attn_factor")
        fields |= {
            "position_embedding_type": "yarn",
            "rotary_scaling_factor": factor,
            "original_max_position_embeddings": keys[_ORIGINAL],
            "yarn_beta_fast": float(keys.get(f"{_SCALING}.yarn_beta_fast", 32.0)),
            "yarn_beta_slow": float(keys.get(f"{_SCALING}.yarn_beta_slow", 1.0)),
            "rotary_attention_factor": None if more is None else more * yarn_attention_factor(factor),
        }
    if LONG in keys:
        longest, original = found["max_position_embeddings"], keys.get(_ORIGINAL) or found["max_position_embeddings"]
        fields |= {
            "position_embedding_type": "longrope",
            "rotary_scaling_factor": max(1.0, longest / original),
            "rotary_attention_factor": keys.get(f"{_SCALING}.attn_factor"),
            "original_max_position_embeddings": original,
            "longrope_long_factors": tuple(keys[LONG]),
            "longrope_short_factors": tuple(keys[SHORT]),
        }
    if FREQS in keys:
        fields |= _llama3(keys, turned=turned, base=fields["rotary_base"])
    local = float(keys.get(_LOCAL, fields["rotary_base"]))
    if local != fields["rotary_base"] or fields.keys() - {"rotary_base", "rotary_percent"}:
        fields["rotary_base_local"] = local
    return fields


def _llama3(keys: Mapping[str, Any], *, turned: int, base: float) -> dict[str, Any]:
    """The settings of Llama 3's scaling, which follow from the factors where no keys say them.

    CheckpointError for factors of another scaling.
    """
    factors, original = keys[FREQS], keys.get(_ORIGINAL) or 8192
    largest = max(factors)
    plain = Scaling().frequencies(turned, base, length=1)
    turns = (original * plain / (2 * math.pi)).tolist()
    between = [(at, each) for at, each in zip(turns, factors) if 1 < each < largest * (1 - 1e-5)]
    low, high = keys.get(_LOW, 1.0), keys.get(_HIGH, 4.0)
    if _LOW not in keys and len({at for at, _ in between}) > 1:
        (first, one), *_, (last, other) = between
        kept = [(1 / each - 1 / largest) / (1 - 1 / largest) for each in (one, other)]
        span = (first - last) / (kept[0] - kept[1])
        low = float(f"{first - kept[0] * span:.5g}")
        high = float(f"{low + span:.5g}")
    scaled = Llama3(factor=largest, low=low, high=high, original_length=original)
    again = plain / scaled.frequencies(turned, base, length=1)
    if not torch.allclose(again, torch.tensor(list(factors), dtype=torch.float64), rtol=1e-4):
        raise CheckpointError(f"{FREQS}: its factors are not those of Llama 3's scaling of rotary positions")
    return {
        "use_rope_scaling": True,
        "rope_scaling_factor": largest,
        "rope_low_freq_factor": low,
        "rope_high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
