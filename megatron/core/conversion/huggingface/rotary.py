"""Rotary positions in config.json: ``rope_parameters`` (transformers 5), or ``rope_theta`` and ``rope_scaling`` (4).

transformers computes scaled frequencies in ``modeling_rope_utils.py``; defaults of missing settings are its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial as bound
from types import MappingProxyType
from typing import Annotated, Any

from megatron.config.model import ModelConfig
from megatron.core.conversion.bounds import Count, Factor
from megatron.core.conversion.huggingface.config_reader import ConfigReader, Feature
from megatron.core.ops.rotary_scaling import yarn_attention_factor
from megatron.small_files import Between

FIELDS = (
    *("position_embedding_type", "rotary_base", "rotary_seq_len_interpolation_factor"),
    *("use_rope_scaling", "rope_scaling_factor", "rope_low_freq_factor", "rope_high_freq_factor"),
    *("original_max_position_embeddings", "rotary_scaling_factor", "rotary_attention_factor"),
    *("yarn_beta_fast", "yarn_beta_slow", "yarn_correction_range_round_to_int", "mscale", "mscale_all_dim"),
    *("longrope_short_factors", "longrope_long_factors"),
)
"""Fields of our architecture that ``read_rotary`` makes; types with partial rotation have ``rotary_percent``, too."""

_UNUSED_SCALES = {"mscale": 1.0, "mscale_all_dim": 0.0}
_ORIGINAL = "original_max_position_embeddings"
_POSITIVE = ("factor", "attention_factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
KINDS: dict[str, Any] = {
    **dict.fromkeys(("rope_theta", *_POSITIVE), Factor),
    "partial_rotary_factor": Annotated[float, Between(1e-6, 1)],
    **dict.fromkeys(("mscale", "mscale_all_dim"), Annotated[float, Between(0, 1e12)]),
    **dict.fromkeys(("rope_type", "type"), str),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), dict[str, Any]),
    **dict.fromkeys(("short_factor", "long_factor"), list[Factor]),
    _ORIGINAL: Count,
    "truncate": bool,
}
"""Types of the settings that ``read_rotary`` asks for."""

_NAMES: Mapping[str, str] = MappingProxyType({})
SCALINGS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
"""Kinds of scaling that ``read_rotary`` knows, all of which most types have."""


def read_rotary(
    reader: ConfigReader, *, partial: bool = False, kinds: Sequence[str] = SCALINGS, renamed: Mapping[str, str] = _NAMES
) -> dict[str, Any]:
    """``FIELDS`` from the settings.

    ``partial``: whether models of this type rotate a part of each head where they say so (then ``rotary_percent``).
    ``kinds``: of scaling that they have. ``renamed``: kinds by their earlier names.
    """
    _check_one_meaning(reader)
    rope = reader.within("rope_scaling", "rope_parameters")
    kind = rope.get("rope_type", rope.get("type", "default"))
    kind = renamed.get(kind, kind)
    percent = rope.get("partial_rotary_factor") or reader.get("partial_rotary_factor") or 1.0
    if percent != 1.0 and not partial:
        said = rope if rope.get("partial_rotary_factor") else reader
        raise said.refuse("partial_rotary_factor", "these families rotate whole heads")
    if kind not in kinds:
        named = "type" if rope.get("rope_type", "") == "" else "rope_type"
        raise rope.refuse(named, f"this rotary scaling is not available; {', '.join(kinds[:-1])} and {kinds[-1]} are")
    base = float(rope.get("rope_theta") or reader("rope_theta"))
    return {"rotary_base": base, "rotary_percent": float(percent), **_scaling(reader, rope, kind)}


def _check_one_meaning(reader: ConfigReader) -> None:
    """Raise CheckpointError for ``rope_parameters`` with something else than ``rope_scaling``, which transformers reads
    in their place: whoever adds it to the settings of transformers 5 loses the rotary base.
    """
    scaling, parameters = reader.get("rope_scaling") or {}, reader.get("rope_parameters") or {}
    read = {**{name: reader.get(name) for name in ("rope_theta", "partial_rotary_factor")}, **scaling}
    read.setdefault("rope_type", scaling.get("type"))
    other = [name for name, value in parameters.items() if value != read.get(name)]
    if scaling and other:
        advice = f"{other[0]} is another one in rope_parameters, and transformers reads only one of the two: remove one"
        raise reader.refuse("rope_scaling", advice)


def _scaling(reader: ConfigReader, rope: ConfigReader, kind: str) -> dict[str, Any]:
    """The fields of one kind of scaling."""
    longest = reader("max_position_embeddings")
    original = reader.get(_ORIGINAL) or rope.get(_ORIGINAL) or longest
    if kind == "linear":
        return {"rotary_seq_len_interpolation_factor": float(rope("factor"))}
    if kind == "llama3":
        low, high = float(rope("low_freq_factor")), float(rope("high_freq_factor"))
        if low >= high:
            raise rope.refuse("low_freq_factor", f"it must be less than high_freq_factor = {high:g}")
        return {
            "use_rope_scaling": True,
            "rope_scaling_factor": _at_least_one(rope),
            "rope_low_freq_factor": low,
            "rope_high_freq_factor": high,
            _ORIGINAL: original,
        }
    if kind == "dynamic":
        return {
            "position_embedding_type": "dynamic_ntk",
            "rotary_scaling_factor": _at_least_one(rope),
            _ORIGINAL: longest,
        }
    given = rope.get("attention_factor")
    shared = {"rotary_attention_factor": None if given is None else float(given), _ORIGINAL: original}
    if kind == "yarn":
        scales = (rope.get("mscale"), rope.get("mscale_all_dim"))
        mscale, mscale_all_dim = scales if all(scales) else _UNUSED_SCALES.values()
        return {
            "position_embedding_type": "yarn",
            "rotary_scaling_factor": _at_least_one(rope) if rope.get("factor") else longest / original,
            "yarn_beta_fast": float(rope.get("beta_fast") or 32),
            "yarn_beta_slow": float(rope.get("beta_slow") or 1),
            "yarn_correction_range_round_to_int": rope.get("truncate", True),
            "mscale": float(mscale),
            "mscale_all_dim": float(mscale_all_dim),
            **shared,
        }
    if kind == "longrope":
        return {
            "position_embedding_type": "longrope",
            "rotary_scaling_factor": max(1.0, float(rope.get("factor") or longest / original)),
            "longrope_short_factors": tuple(map(float, rope("short_factor"))),
            "longrope_long_factors": tuple(map(float, rope("long_factor"))),
            **shared,
        }
    return {}


def _at_least_one(rope: ConfigReader) -> float:
    if rope("factor") < 1:
        raise rope.refuse("factor", "it must be at least 1")
    return float(rope("factor"))


def written_rotary(model: ModelConfig, *, partial: bool = False) -> dict[str, Any]:
    """The settings from our architecture, as transformers 4 and 5 read them.

    ``partial``: as for ``read_rotary``; then the part is always written, whatever transformers takes where it is
    missing.
    """
    found: dict[str, Any] = {"rope_theta": model.rotary_base, "rope_scaling": _written_scaling(model)}
    if partial:
        found["partial_rotary_factor"] = model.rotary_percent
    if model.position_embedding_type == "dynamic_ntk":  # transformers takes the one for the other
        found["max_position_embeddings"] = model.original_max_position_embeddings
    return found


def _written_scaling(model: ModelConfig) -> dict[str, Any] | None:
    kind, original = model.position_embedding_type, model.original_max_position_embeddings
    factor, given = {"factor": model.rotary_scaling_factor}, model.rotary_attention_factor
    scales = {"mscale": model.mscale, "mscale_all_dim": model.mscale_all_dim}
    if kind == "yarn" and scales != _UNUSED_SCALES and not all(scales.values()):  # transformers takes both or neither
        given = yarn_attention_factor(model.rotary_scaling_factor, **scales) if given is None else given
    attention = {} if given is None else {"attention_factor": given}
    if model.use_rope_scaling:
        return {
            "rope_type": "llama3",
            "factor": model.rope_scaling_factor,
            "low_freq_factor": model.rope_low_freq_factor,
            "high_freq_factor": model.rope_high_freq_factor,
            _ORIGINAL: original,
        }
    if model.rotary_seq_len_interpolation_factor is not None:
        return {"rope_type": "linear", "factor": model.rotary_seq_len_interpolation_factor}
    if kind == "dynamic_ntk":
        return {"rope_type": "dynamic", **factor}
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            **factor,
            **attention,
            "beta_fast": model.yarn_beta_fast,
            "beta_slow": model.yarn_beta_slow,
            "truncate": model.yarn_correction_range_round_to_int,
            **(scales if all(scales.values()) else {}),
            _ORIGINAL: original,
        }
    if kind == "longrope":
        usual = model.max_position_embeddings / (original or 1)
        return {
            "rope_type": "longrope",
            **({} if usual == model.rotary_scaling_factor else factor),
            **attention,
            "short_factor": list(model.longrope_short_factors),
            "long_factor": list(model.longrope_long_factors),
            _ORIGINAL: original,
        }
    return None


ROTARY = Feature(by_code=FIELDS, defaults={"rope_theta": 10000.0}, kinds=KINDS, read=read_rotary, write=written_rotary)
"""Rotary positions of whole heads, scaled or not."""


def partial_rotary(default: float | None = None) -> Feature:
    """Rotary positions of a part of each head; ``default``: the part where no setting says it."""
    return Feature(
        by_code=(*FIELDS, "rotary_percent"),
        defaults={**ROTARY.defaults, **({} if default is None else {"partial_rotary_factor": default})},
        kinds=KINDS,
        read=bound(read_rotary, partial=True),
        write=bound(written_rotary, partial=True),
    )


def neither_rotary_nor_none(model: ModelConfig) -> list[str]:
    """Why a type whose positions are rotary or none has no such model."""
    has_either = model.is_rotary or model.position_embedding_type == "none"
    return [] if has_either else ["positions are not rotary"]
