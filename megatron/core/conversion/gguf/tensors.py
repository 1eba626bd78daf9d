"""Which tensors of a GGUF file are made of which of a published model's: names by the gguf package, and rules."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron.config.family import FamilyConfig
from megatron.config.model import ModelConfig
from megatron.core.checkpointing.manifest import listed
from megatron.core.conversion.gguf.architecture import Architecture
from megatron.core.conversion.gguf.transforms import STACKED, Rule, stacked_parts
from megatron.core.conversion.tables import Match
from megatron.core.conversion.transforms import SAME
from megatron.errors import CheckpointError

EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"
_ONE_OF_MANY = re.compile(r"(.+\.(?:experts|norms))\.(\d+)\.(.+)")


def divided(
    shapes: Mapping[str, Sequence[int]], groups: Sequence[object], architecture: Architecture
) -> tuple[list[str], list[Match]]:
    """Published tensors that a file has whole, and those that it has in parts, or under the name of another type."""
    whole, found = list[str](), list[Match]()
    divisions = architecture.divisions(groups)
    for name, shape in shapes.items():
        own = next((each for each in divisions if name.endswith(each.end)), None)
        if own is None:
            whole.append(name)
        else:
            parts = tuple(f"{name.removesuffix(own.end)}{part}" for part in own.parts)
            found.append(Match(name, parts, own.transform, tuple(shape)))
    return whole, found


def file_matches(
    shapes: Mapping[str, Sequence[int]], model: ModelConfig, groups: Sequence[object], architecture: Architecture
) -> list[Match]:
    """The file's tensors, and of which published ones each is made. ``shapes``: of those, divided, by name.

    CheckpointError for tensors that the architecture has no names for.
    """
    rules = architecture.rules(groups)
    stacks = [number for each in groups if isinstance(each, FamilyConfig) for number in each.stacks(model)]
    names = _names(architecture, max([model.num_layers, *stacks]))
    found: dict[str, list[str]] = {}
    unnamed = []
    for name in shapes:
        many = _ONE_OF_MANY.fullmatch(name)
        single = name if many is None else f"{many[1]}.{many[3]}".replace(".norms.", ".")
        endings = (".weight", ".bias")
        single = single.replace("e_score_correction_bias", "e_score_correction.bias")
        other = single.removeprefix("transformer.")
        for part, in_table in architecture.aliases.items():
            other = other.replace(part, in_table)
        theirs = names.get_name(single, endings) or names.get_name(other, endings)
        if theirs is None or theirs.endswith(architecture.lacks):
            unnamed.append(name)
        else:
            found.setdefault(theirs, []).append(name)
    if unnamed:
        raise CheckpointError(
            f"this model can't be written as GGUF: llama.cpp's {architecture.name} has no tensors for "
            f"{listed(unnamed)}; a folder that vLLM and transformers read is written by --to hf"
        )
    if missing := [name for name in architecture.needs if name not in found]:
        raise CheckpointError(
            f"this model can't be written as GGUF: llama.cpp's {architecture.name} needs {listed(missing)}, which it "
            "doesn't have; a folder that vLLM and transformers read is written by --to hf"
        )
    return [_match(name, parts, shapes, model, rules) for name, parts in found.items()]


def _match(
    name: str, parts: Sequence[str], shapes: Mapping[str, Sequence[int]], model: ModelConfig, rules: Sequence[Rule]
) -> Match:
    transform = next((rule.transform for rule in rules if parts[0].endswith(rule.ends)), SAME)
    if _ONE_OF_MANY.fullmatch(parts[0]):
        transform = STACKED if transform is SAME else stacked_parts(transform)
    made = transform.join([torch.empty(tuple(shapes[part]), device="meta") for part in parts], model)
    return Match(name, tuple(parts), transform, tuple(made.shape))


def _names(architecture: Architecture, num_layers: int) -> Any:
    import gguf

    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    return gguf.get_tensor_name_map(kinds[architecture.name], num_layers)
