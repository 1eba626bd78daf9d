"""Which tensors of a folder are written in few bits, and what is refused before any work."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.core.conversion.huggingface.cache_scales import CACHE_SCHEME, written_cache_scales
from megatron.core.conversion.huggingface.micro_scales import check_micro
from megatron.core.conversion.huggingface.stored_codes import (
    HF_QUANT_CONFIG,
    dequantized,
    is_block,
    is_for_modelopt,
    modelopt_config,
    quantization_config,
    stored,
)
from megatron.core.conversion.portable import LazyScales, LazyTensor, PortableModel, Quantization
from megatron.core.conversion.tables import Match, to_ours, to_theirs
from megatron.core.conversion.transforms import TRANSPOSED, TRANSPOSED_THIRDS
from megatron.core.quantization.scheme import Scheme
from megatron.core.quantization.targets import is_quantized
from megatron.errors import ConfigError

# Projections of a few rows: steps and gates of a mixer's heads.
_SMALL = ("in_proj_ba", "a_proj", "b_proj")
# Of experts, transformers dequantizes packed symmetric numbers and floats with one scale; and the others to take.
_NO_EXPERTS = {"w8a8": "int8 or fp8", "int4-asym": "int4", "nvfp4": "mxfp4 or int4", "mxfp8": "fp8"}
_FLOATS_ONLY = ("olmo_hybrid",)
_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True)
class Rounding:
    """Weights are rounded while they are written. ``ignored``: linear layers that aren't, by name or ``re:`` and a
    pattern, as ``--quantize-ignore`` gives them.
    """

    scheme: Scheme
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class Chosen:
    """What is quantized in a folder. ``scales``: by their names of weights; None where scales are yet to be chosen.
    ``ignored``: names and patterns of all other linear layers. ``cache``: scales of keys and values.
    ``largest``: the largest magnitude of weights that programs join, by name of each.
    """

    scheme: Scheme
    scales: Mapping[str, LazyScales | None] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    cache: Mapping[str, LazyTensor] = field(default_factory=dict)
    largest: Mapping[str, Callable[[], Tensor]] = field(default_factory=dict)

    def settings(self) -> dict[str, Any]:
        """What config.json says."""
        found = quantization_config(self.scheme, self.ignored)
        return {"quantization_config": found | ({"kv_cache_scheme": CACHE_SCHEME} if self.cache else {})}

    def write_for_modelopt(self, folder: Path) -> None:
        """Write the settings that programs of ModelOpt read, beside an FP8 model."""
        if (found := modelopt_config(self.scheme, self.ignored, has_cache=bool(self.cache))) is not None:
            (folder / HF_QUANT_CONFIG).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")

    def stored(self, tensors: Mapping[str, LazyTensor], dtype: torch.dtype) -> dict[str, LazyTensor]:
        """The tensors as the folder keeps them. ``dtype``: of scales."""
        found: dict[str, LazyTensor] = {}
        for name, tensor in tensors.items():
            if name in self.scales:
                joined = self.largest.get(name)
                found |= stored(name, tensor, self.scheme, self.scales[name], dtype, largest=joined)
            else:
                found[name] = tensor
        return {**found, **self.cache}

    def dequantized(
        self, tensors: Mapping[str, LazyTensor], dtype: torch.dtype, *, in_fp32: bool
    ) -> dict[str, LazyTensor]:
        """The tensors that a reader in fp32 computes with. ``in_fp32``: see ``stored_codes.dequantized``."""
        return {
            name: dequantized(
                name, tensor, self.scheme, self.scales[name], dtype, in_fp32=in_fp32, largest=self.largest.get(name)
            )
            if name in self.scales
            else tensor
            for name, tensor in tensors.items()
        }


def chosen(
    found: Sequence[Match],
    tensors: Mapping[str, LazyTensor],
    portable: PortableModel,
    rounding: Rounding | None,
    model_type: str,
) -> Chosen | None:
    """What is quantized of the ``tensors`` of a folder; None for nothing. Raises ConfigError for what can't be."""
    given = portable.quantization
    if given is not None and rounding is not None:
        raise ConfigError(
            f"--quantize {rounding.scheme.name}: the model is quantized already, to {given.scheme.name} by "
            f"{given.method}; quantize the model that it was made of"
        )
    if rounding is not None:
        made = _to_round(found, tensors, rounding, model_type)
        return replace(made, largest=_largest_of_joined(found, portable)) if rounding.scheme.name == "nvfp4" else made
    return None if given is None else _as_given(found, tensors, given, portable.model, model_type)


def _largest_of_joined(found: Sequence[Match], portable: PortableModel) -> dict[str, Callable[[], Tensor]]:
    """For weights of theirs that are one of ours: the largest magnitude of all, found once."""
    made: dict[str, Callable[[], Tensor]] = {}
    for match in found:
        if len(match.theirs) > 1 and is_quantized(match.ours):
            made |= dict.fromkeys(match.theirs, cache(partial(_magnitude, portable.tensors[match.ours])))
    return made


def _magnitude(tensor: LazyTensor) -> Tensor:
    return tensor.make().float().abs().amax()


def as_read(
    found: Sequence[Match],
    portable: PortableModel,
    rounding: Rounding | None,
    model_type: str,
    *,
    in_fp32: bool = False,
) -> PortableModel:
    """The model that a reader of the folder in fp32 computes with, from the source and not from the folder.

    ``in_fp32``: codes are multiplied in fp32, and not in the type of scales.
    """
    tensors = to_theirs(found, portable.tensors, portable.model)
    in_few_bits = chosen(found, tensors, portable, rounding, model_type)
    if in_few_bits is None:
        return portable
    read = {
        name: replace(tensor, dtype=torch.float32, make=partial(_wide, tensor))
        for name, tensor in in_few_bits.dequantized(tensors, portable.dtype, in_fp32=in_fp32).items()
    }
    return replace(portable, tensors=to_ours(found, read, portable.model, where="the source"), quantization=None)


def _wide(tensor: LazyTensor) -> Tensor:
    return tensor.make().float()


def _to_round(found: Sequence[Match], tensors: Mapping[str, LazyTensor], rounding: Rounding, model_type: str) -> Chosen:
    scheme = rounding.scheme
    if scheme.needs_calibration:
        raise ConfigError(f"--quantize {scheme.name}: scales of its activations are found by tools/quantize.py")
    linear = {theirs: match for match in found if is_quantized(match.ours) for theirs in match.theirs}
    wanted = {name: match for name, match in linear.items() if _last(name) not in _SMALL}
    for pattern in rounding.ignored:
        hit = {name for name in linear if _is_named(_module(name), pattern)}
        if not hit and not any(_is_named(_module(name), pattern) for name in tensors):
            names = [_module(name) for name in linear]
            nearest = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
            raise ConfigError(
                f"--quantize-ignore {pattern} names no linear layer of this {model_type}; names are such as "
                f"{', '.join(nearest)}, or re: and a regular expression for whole names"
            )
        wanted = {name: match for name, match in wanted.items() if name not in hit}
    _check(wanted, tensors, scheme, model_type)
    return Chosen(scheme, dict.fromkeys(wanted), _ignored(tensors, wanted, has_patterns=not is_block(scheme)))


def _check(wanted: Mapping[str, Match], tensors: Mapping[str, LazyTensor], scheme: Scheme, model_type: str) -> None:
    """Raise ConfigError for weights that the format or its readers don't have."""
    if not wanted:
        raise ConfigError(f"--quantize {scheme.name}: nothing is left to quantize; ignore fewer layers")
    if turned := [name for name, match in wanted.items() if match.transform in (TRANSPOSED, TRANSPOSED_THIRDS)]:
        raise ConfigError(
            f"--quantize {scheme.name}: {turned[0]} of a {model_type} is no linear layer to transformers (Conv1D), "
            "which reads no quantized one; --to gguf quantizes such models"
        )
    if stacked := [name for name in wanted if len(tensors[name].shape) != 2]:
        part = re.escape(_module(stacked[0]).split(".")[-1 if stacked[0].endswith(".weight") else -2])
        raise ConfigError(
            f"--quantize {scheme.name}: a {model_type} keeps all experts in one tensor ({stacked[0]}), which quantized "
            rf"folders haven't; --quantize-ignore 're:.*\.{part}\b.*' leaves them as they are"
        )
    if scheme.name in _NO_EXPERTS and (experts := [name for name in wanted if _EXPERT.search(name)]):
        raise ConfigError(
            f"--quantize {scheme.name}: transformers reads no experts in it ({experts[0]}); take "
            rf"{_NO_EXPERTS[scheme.name]}, or leave them as they are with --quantize-ignore 're:.*\.experts\..*'"
        )
    if model_type in _FLOATS_ONLY and scheme.weights.kind == "int":
        raise ConfigError(
            f"--quantize {scheme.name}: transformers joins convolutions of a {model_type} while it loads them, and "
            "then reads no weights in int8 or int4; take fp8 or fp8-block"
        )
    sides, widths = scheme.weights.block, {tensors[name].shape[1] for name in wanted}
    for name in wanted:
        rows, columns = tensors[name].shape
        check_micro(name, columns, scheme)
        scheme.weights.check_divides((rows, columns), name, others=widths)
        if is_block(scheme) and any(size > side and size % side for size, side in zip((rows, columns), sides)):
            raise ConfigError(
                f"--quantize {scheme.name}: {name} has {rows} rows and {columns} columns, no whole blocks of "
                f"{sides[0]} x {sides[1]}, and transformers reads other blocks then; take --quantize fp8, which has a "
                rf"scale for each row, or --quantize-ignore 're:.*\.{_last(name)}$'"
            )


def _as_given(
    found: Sequence[Match],
    tensors: Mapping[str, LazyTensor],
    given: Quantization,
    model: ModelConfig,
    model_type: str,
) -> Chosen:
    """The scales of a quantized model under their names: rows of scales move as rows of weights."""
    if given.scheme.weights.bits == 3:
        raise ConfigError(
            f"the model is quantized to {given.scheme.name}, which no program reads: it is there to compare methods; "
            "quantize the checkpoint that it was made of to int4"
        )
    if ordered := [name for name, each in given.scales.items() if each.groups is not None]:
        raise ConfigError(f"{ordered[0]}: groups of inputs that aren't neighbours have no reader; quantize it without")
    parts: dict[str, dict[str, LazyTensor]] = {}
    held = [match for match in found if match.ours in given.scales]
    for kind in ("factors", "zeros"):
        ours = {match.ours: getattr(given.scales[match.ours], kind) for match in held}
        rows = [match for match in held if ours[match.ours] is not None]
        parts[kind] = to_theirs(rows, ours, model)
    scales: dict[str, LazyScales | None] = {
        name: LazyScales(
            parts["factors"][name],
            parts["zeros"].get(name),
            inputs=given.scales[match.ours].inputs,
        )
        for match in held
        for name in match.theirs
    }
    _check({name: match for match in held for name in match.theirs}, tensors, given.scheme, model_type)
    of_cache = written_cache_scales(found, given.cache, for_modelopt=is_for_modelopt(given.scheme))
    return Chosen(given.scheme, scales, _ignored(tensors, scales, has_patterns=not is_block(given.scheme)), of_cache)


def _ignored(tensors: Mapping[str, LazyTensor], wanted: Collection[str], *, has_patterns: bool) -> list[str]:
    """Names of the linear layers that aren't quantized. ``has_patterns``: with one pattern for all whose last name no
    quantized layer has.
    """
    # A tied output layer has no tensor, and some types' has another name in transformers than in files.
    found: dict[str, None] = {"lm_head": None}
    used = {_last(name) for name in wanted}
    matrices = [name for name, tensor in tensors.items() if name.endswith(".weight") and len(tensor.shape) == 2]
    for name in matrices:
        if name in wanted or _is_embedding(name):
            continue
        module = _module(name)
        prefix, _, last = module.rpartition(".")
        found[module if not has_patterns or not prefix or last in used else rf"re:.*\.{re.escape(last)}$"] = None
    return list(found)


def _is_embedding(name: str) -> bool:
    return bool(re.search(r"(embed|embeddings|embed_\w+|wte|wpe|shared)\.weight$", name)) and "embed_out" not in name


def _last(name: str) -> str:
    """The last name of a weight's module."""
    return _module(name).rpartition(".")[2]


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _is_named(module: str, pattern: str) -> bool:
    """Whether a module has a name or pattern of ``ignore``; ConfigError for a pattern that is no expression."""
    if not pattern.startswith("re:"):
        return module == pattern
    try:
        return re.match(pattern.removeprefix("re:"), module) is not None
    except re.error as error:
        raise ConfigError(f"--quantize-ignore {pattern} is no regular expression: {error}") from None
