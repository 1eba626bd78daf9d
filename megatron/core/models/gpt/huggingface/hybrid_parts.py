"""What published hybrids have in common: Mamba-2 layers, and a pattern of kinds of layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from megatron.config.hybrid import HybridConfig
from megatron.config.hybrid_pattern import ATTENTION, EXPERTS, LETTERS, MAMBA
from megatron.config.layer_patterns import shortest_pattern
from megatron.config.mamba import MambaConfig
from megatron.config.model import ModelConfig
from megatron.core.conversion.bounds import Heads, Width
from megatron.core.conversion.huggingface.biases import biases
from megatron.core.conversion.huggingface.config_reader import ConfigReader
from megatron.core.conversion.huggingface.parts import PublishedPart
from megatron.core.conversion.tables import Row
from megatron.core.conversion.transforms import QUERY_KEY_VALUE
from megatron.core.models.gpt.huggingface.llama import OURS

FIXED: dict[str, Any] = {
    "normalization": "RMSNorm",
    "hidden_dropout": 0.0,
    **biases(qkv=False, output=False, mlp=False),
}
"""Fields that published hybrids have, unless their type says otherwise."""

_TYPES = {"linear_attention": MAMBA, "mamba": MAMBA, "full_attention": ATTENTION, "attention": ATTENTION}
_NO_LIMIT = 1e30  # of the time step
_INFINITY = {"__float__": "Infinity"}  # as transformers 5 writes it


def mixer_rows(theirs: str, *, norm: str) -> tuple[Row, ...]:
    """Rows of a Mamba-2 layer, whose parts all have the same names. ``theirs``, ``norm``: modules of the published
    model.
    """
    mixer = f"{OURS}.mixer"
    modules = (Row(f"{mixer}.{name}", f"{theirs}.{name}") for name in ("in_proj", "conv1d", "norm", "out_proj"))
    return (Row(f"{OURS}.norm", norm), Row(mixer, theirs), *modules)


def attention_rows(theirs: str, *, norm: str) -> tuple[Row, ...]:
    """Rows of an attention layer; ``theirs``, ``norm``: as in ``mixer_rows``."""
    own = f"{OURS}.self_attention"
    return (
        Row(f"{OURS}.input_layernorm", norm),
        Row(f"{own}.linear_qkv", tuple(f"{theirs}.{letter}_proj" for letter in "qkv"), QUERY_KEY_VALUE),
        Row(f"{own}.linear_proj", f"{theirs}.o_proj"),
    )


def layer_types(reader: ConfigReader, name: str, kinds: Mapping[str, str] = _TYPES) -> str:
    """The letters of a list of types of layers, by ``kinds``; CheckpointError for a type that there is not."""
    types = reader(name)
    if not types or not {*types} <= kinds.keys():
        raise reader.refuse(name, f"it must name each layer, as {' or '.join(kinds)}")
    return "".join(kinds[each] for each in types)


@dataclass(frozen=True, kw_only=True)
class PublishedPattern(PublishedPart[HybridConfig]):
    """The pattern of a type's hybrids. ``known``: the letters of its layers."""

    known: str

    @override
    def missing(self, part: HybridConfig, model: ModelConfig) -> Sequence[str]:
        """No other model is of such a type, nor one with layers of another kind."""
        if not part.is_hybrid:
            return ("its layers are all alike, and not those of a hybrid's pattern",)
        others = {*part.letters} - {*self.known}
        return [f"it has {kind} layers" for letter, kind in LETTERS.items() if letter in others]


def pattern_part(
    known: str, read: Callable[[ConfigReader], str], write: Callable[[str, ModelConfig], dict[str, Any]]
) -> PublishedPattern:
    """The pattern of hybrids with layers of the ``known`` letters, which ``read`` finds and ``write`` says again."""
    return PublishedPattern(
        group=HybridConfig,
        known=known,
        read=lambda reader: {"hybrid_layer_pattern": read(reader)},
        write=lambda hybrid, model: write(hybrid.letters, model),
        rows=lambda hybrid: (),
    )


def expert_layers_of(letters: str) -> str:
    """``moe_layer_freq`` of a hybrid."""
    return shortest_pattern(tuple(letter == EXPERTS for letter in letters))


LIMIT_KINDS: dict[str, Any] = {"time_step_limit": list[Any]}


def read_limits(reader: ConfigReader) -> tuple[float, float] | None:
    """Limits of the time step by ``time_step_limit``; None where no step is beyond them."""
    limit = reader.get("time_step_limit")
    given = (0.0, math.inf) if limit is None else limit
    found = [float("inf") if each in (_INFINITY, "Infinity", "inf") else each for each in given]
    if len(found) != 2 or not all(isinstance(each, int | float) for each in found) or not found[0] < found[1]:
        raise reader.refuse("time_step_limit", "it must be two numbers, the lower one first")
    return limits(*found)


def limits(lowest: float, highest: float) -> tuple[float, float] | None:
    """Limits of a step, which is positive; None where none is beyond them."""
    if lowest <= 0 and highest >= _NO_LIMIT:
        return None
    return max(float(lowest), 0.0), min(float(highest), _NO_LIMIT)


def written_limits(mamba: MambaConfig) -> dict[str, Any]:
    """``time_step_limit``, unless it is the default."""
    if mamba.mamba_time_step_limits is None:
        return {}
    lowest, highest = mamba.mamba_time_step_limits
    return {"time_step_limit": [lowest, _INFINITY if highest >= _NO_LIMIT else highest]}


def expansion(mamba: MambaConfig, model: ModelConfig) -> int:
    """The factor between hidden size and the width of all heads, where it is a whole number."""
    return max(mamba.inner_size(model) // model.hidden_size, 1)


@dataclass(frozen=True, kw_only=True)
class PublishedMamba(PublishedPart[MambaConfig]):
    """The Mamba-2 layers of a type's models. ``expands``: whether the width of all heads is a multiple of the hidden
    size.
    """

    expands: bool = True

    @override
    def missing(self, part: MambaConfig, model: ModelConfig) -> Sequence[str]:
        """Widths that no factor says are those of no such model."""
        width = part.inner_size(model)
        if not self.expands or (width >= model.hidden_size and width % model.hidden_size == 0):
            return ()
        return (f"Mamba-2 layers are {width} wide, which is no multiple of the hidden size {model.hidden_size}",)

    @override
    def as_in(self, part: MambaConfig, usual: MambaConfig) -> MambaConfig:
        """Keep the spelling of limits that are the usual ones: with no highest, or with one that no step reaches."""
        own = part.mamba_time_step_limits
        if own is None or limits(*own) != usual.mamba_time_step_limits:
            return usual
        return MambaConfig(**{**vars(usual), "mamba_time_step_limits": own})


def mamba_part(
    settings: Mapping[str, str],
    rows: Sequence[Row],
    *,
    read: Callable[[ConfigReader], dict[str, Any]] = lambda reader: {"mamba_time_step_limits": read_limits(reader)},
    write: Callable[[MambaConfig, ModelConfig], dict[str, Any]] = lambda mamba, model: written_limits(mamba),
    expands: bool = True,
) -> PublishedMamba:
    """Mamba-2 layers with these ``settings`` by our field, and what ``read`` and ``write`` have beyond them."""

    def read_all(reader: ConfigReader) -> dict[str, Any]:
        found = {**{ours: reader(theirs) for ours, theirs in settings.items()}, **read(reader)}
        is_default = found["mamba_num_heads"] * found["mamba_head_dim"] == 2 * reader("hidden_size")
        return {**found, "mamba_num_heads": None} if is_default else found

    def write_all(mamba: MambaConfig, model: ModelConfig) -> dict[str, Any]:
        values = {**vars(mamba), "mamba_num_heads": mamba.num_heads(model)}
        return {**{theirs: values[ours] for ours, theirs in settings.items()}, **write(mamba, model)}

    return PublishedMamba(group=MambaConfig, read=read_all, write=write_all, rows=lambda mamba: rows, expands=expands)


def mamba_kinds(settings: Mapping[str, str]) -> dict[str, Any]:
    """Types and bounds of the settings of ``mamba_part``."""
    bounds = {"mamba_num_heads": Heads, "mamba_num_groups": Heads, "mamba_conv_kernel_dim": Heads}
    return {**{theirs: bounds.get(ours, Width) for ours, theirs in settings.items()}, **LIMIT_KINDS}
