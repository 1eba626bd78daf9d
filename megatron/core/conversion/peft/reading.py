"""A PEFT folder beside its base: adapters of ours that compute the same."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron.config.lora import ABSORBED, LAYERS, LoraConfig, is_adapter, without_adapters
from megatron.config.model import ModelConfig
from megatron.core.checkpointing.manifest import listed
from megatron.core.conversion.huggingface.formats import format_of
from megatron.core.conversion.huggingface.reading import CONFIG, read_config, tensors_of
from megatron.core.conversion.huggingface.writing import fitting_type, theirs_of
from megatron.core.conversion.peft.settings import ModuleSettings, PeftSettings, ends_of, read_settings
from megatron.core.conversion.peft.units import TheirMatrix, Unit, their_matrices, without_experts
from megatron.core.conversion.portable import LazyTensor, PortableModel, parameters_of
from megatron.core.conversion.tables import to_ours, to_theirs
from megatron.core.files.remote_path import AnyPath
from megatron.errors import CheckpointError, visible

WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
PREFIX = "base_model.model."
_LONGEST_NAME = 300  # of a base, in a note
_FACTORS = (".lora_A.weight", ".lora_B.weight")


@dataclass(frozen=True)
class PeftAdapter:
    """The adapters of a PEFT folder as parts of a model of ours. ``tensors``: every parameter of adapters by name.
    ``saved``: tensors of the published model that were trained whole, by their names there.
    """

    settings: PeftSettings
    lora: LoraConfig
    tensors: Mapping[str, Tensor]
    saved: Mapping[str, LazyTensor]


@dataclass(frozen=True)
class _Pair:
    """The factors of one of their matrices, in fp32; ``b`` times its own scale, as a part of the usual one."""

    a: Tensor
    b: Tensor
    theirs: TheirMatrix


def with_peft(base: PortableModel, folder: Path) -> PortableModel:
    """The model with the adapters of a PEFT folder beside its weights, and in place of them those that were trained
    whole. Raises CheckpointError for adapters of another base, and as ``read_peft``.
    """
    model_type = published_type(base.model, base.groups, base.companions)
    found = read_peft(folder, base.model, base.groups, model_type)
    tensors = {**base.tensors, **replaced(found, base, model_type)}
    dtype = base.dtype
    for name, tensor in found.tensors.items():
        kept = tensor.to(dtype) if dtype.itemsize > tensor.dtype.itemsize else tensor
        tensors[name] = LazyTensor(tuple(kept.shape), kept.dtype, kept.clone)
    groups = (*without_adapters(base.groups), found.lora)
    order = parameters_of(base.model, groups)
    notes = (*base.notes, *notes_about(found.settings, folder))
    return dataclasses.replace(base, tensors={name: tensors[name] for name in order}, groups=groups, notes=notes)


def notes_about(settings: PeftSettings, folder: Path) -> tuple[str, ...]:
    """What a user of the folder may want to know."""
    if not settings.base:
        return ()
    return (f"note: the adapter in {folder} says that it was trained beside {visible(settings.base[:_LONGEST_NAME])}",)


def published_type(model: ModelConfig, groups: Sequence[object], companions: Mapping[str, AnyPath]) -> str:
    """The published type whose names of modules a PEFT folder for a model has: that of the settings among the files
    which travel with it, or one that it fits.
    """
    path = companions.get(CONFIG)
    own = read_config(path.parent).get("model_type") if path else None
    return fitting_type(model, without_adapters(groups), wanted=[own or ""])


def read_peft(
    folder: Path, model: ModelConfig, groups: Sequence[object], model_type: str, *, most_rank: int | None = None
) -> PeftAdapter:
    """The adapters of a PEFT folder for a published model of this type, whose rank is at most ``most_rank``.

    Raises CheckpointError for a folder that isn't one, settings that mean what can't be computed here, and tensors that
    don't fit the settings or the model.
    """
    settings = read_settings(folder)
    path = next((folder / name for name in WEIGHTS if (folder / name).exists()), None)
    if path is None:
        raise CheckpointError(f"{folder} holds no {' or '.join(WEIGHTS)}: copy the whole PEFT folder")
    modules, saved = _sorted(_current(tensors_of(path), model_type, where=str(path)), where=str(path))
    theirs, others = their_matrices(model, groups, model_type)
    _check_names(modules, theirs, others, where=str(path), model_type=model_type)
    _check_saved(settings, saved, model, groups, model_type, where=str(path))
    said = settings.of_modules(modules)
    _check_targets(settings, said, where=str(path))
    pairs = {
        name: _pair(name, factors, theirs[name], said[name], settings, str(path)) for name, factors in modules.items()
    }
    of_units = _by_unit(pairs.values())
    rank = max((len(a) for a, _ in of_units.values()), default=settings.rank)
    if most_rank is not None and rank > most_rank:  # all are filled up to the largest
        raise CheckpointError(f"its rank is {rank}; at most {most_rank} is served")
    lora = _lora(settings, rank, of_units)
    if ABSORBED in lora.lora_targets:
        raise CheckpointError(
            f"{path} has adapters beside kv_b_proj: generation never multiplies by it itself, so they would be "
            "left out there; merge them with peft's merge_and_unload(), and load the merged model"
        )
    layouts = parameters_of(model, (*without_adapters(groups), lora))
    expected = {name: layout.shape for name, layout in layouts.items() if is_adapter(name)}
    tensors = {name: torch.zeros(shape) for name, shape in expected.items()}
    for unit, (a, b) in of_units.items():
        for factor, own in (("a", a), ("b", b)):
            name = without_experts(unit).parameter(factor)
            if name not in tensors:
                raise CheckpointError(f"{path} has an adapter for {unit.layer}, which can have none here")
            place = tensors[name] if unit.expert is None else tensors[name][unit.expert]
            (place[: len(own)] if factor == "a" else place[:, : own.shape[1]]).copy_(own)
    return PeftAdapter(settings, lora, tensors, saved)


def replaced(found: PeftAdapter, base: PortableModel, model_type: str) -> dict[str, LazyTensor]:
    """Our tensors that are made of those which were trained whole, and otherwise of the base's.

    Raises CheckpointError for a tensor that the model hasn't got, or of another shape.
    """
    if not found.saved:
        return {}
    plain = without_adapters(base.groups)
    matches = theirs_of(base.model, plain, model_type)
    names = {name for match in matches for name in match.theirs}
    if unknown := sorted({*found.saved} - names):
        raise CheckpointError(
            f"{found.settings.where}: the folder holds {listed(unknown)}, which the base (a {model_type}) does not "
            "have: give the base with which the adapter was trained"
        )
    folder = Path(found.settings.where).parent
    affected = [match for match in matches if {*match.theirs} & {*found.saved}]
    all_theirs = to_theirs(affected, base.tensors, base.model)
    for name, tensor in found.saved.items():
        there = all_theirs[name]
        if not tensor.dtype.is_floating_point:
            raise CheckpointError(f"{folder}: {name} is of type {tensor.dtype}, and a weight has fp32 or bf16")
        if there.shape != tensor.shape:
            raise CheckpointError(
                f"{found.settings.where}: {name} is {list(tensor.shape)} in the folder and {list(there.shape)} in the "
                "base: give the base beside which the adapter was trained"
            )
        make = partial(_finite, tensor, there.dtype, name, str(folder))
        all_theirs[name] = LazyTensor(there.shape, there.dtype, make)
    return to_ours(affected, all_theirs, base.model, where=found.settings.where)


def _finite(tensor: LazyTensor, dtype: torch.dtype, name: str, where: str) -> Tensor:
    """The tensor in a type; CheckpointError where it isn't finite."""
    made = tensor.make().to(dtype)
    if not made.isfinite().all():
        raise CheckpointError(f"{where}: {name}, which was trained whole, holds NaN or infinity: train it again")
    return made


def _current(tensors: Mapping[str, LazyTensor], model_type: str, *, where: str) -> dict[str, LazyTensor]:
    """The tensors by their names in today's published model."""
    if wrong := sorted(name for name in tensors if not name.startswith(PREFIX)):
        raise CheckpointError(f"{where} holds {listed(wrong)}; names in a PEFT folder begin with {PREFIX}")
    published = format_of(model_type)
    assert published is not None, "the model is of this type"
    stripped = {  # a layer that has an adapter is inside of one of peft's
        name: name.removeprefix(PREFIX).replace(".base_layer.", ".") for name in tensors
    }
    factors = {name: next((each for each in _FACTORS if name.endswith(each)), "") for name in tensors}
    plain = {name: stripped[name].removesuffix(end) + (".weight" if end else "") for name, end in factors.items()}
    today = published.types[model_type].current_names(plain.values())
    found = dict[str, LazyTensor]()
    for name, tensor in tensors.items():
        now = today[plain[name]]
        own = now.removesuffix(".weight") + factors[name] if factors[name] else now
        if own in found:
            raise CheckpointError(f"{where} holds {own} twice, under two names: save the adapter again")
        found[own] = tensor
    return found


def _sorted(
    tensors: Mapping[str, LazyTensor], *, where: str
) -> tuple[dict[str, tuple[LazyTensor, LazyTensor]], dict[str, LazyTensor]]:
    """Pairs by module, and other tensors by name."""
    factors, saved = defaultdict[str, dict[str, LazyTensor]](dict), dict[str, LazyTensor]()
    for name, tensor in tensors.items():
        end = next((each for each in _FACTORS if name.endswith(each)), None)
        if end is not None:
            factors[name.removesuffix(end)][end] = tensor
        elif ".lora_" in name:
            raise CheckpointError(
                f"{where} holds {name}: of adapters only {' and '.join(_FACTORS)} of linear layers are read, none of "
                "embeddings and stacked parameters; merge them into the base with peft's merge_and_unload"
            )
        else:
            saved[name] = tensor
    for module, each in factors.items():
        if missing := [end for end in _FACTORS if end not in each]:
            raise CheckpointError(f"{where} has no {module}{missing[0]}, the other half of its adapter: copy it again")
    return {module: (each[_FACTORS[0]], each[_FACTORS[1]]) for module, each in factors.items()}, saved


def _check_names(
    modules: Iterable[str],
    theirs: Mapping[str, TheirMatrix],
    others: Mapping[str, str],
    *,
    where: str,
    model_type: str,
) -> None:
    for module in sorted(modules):
        if module in others:
            raise CheckpointError(
                f"{where} has an adapter for {module}, which is not made of rows of one weight here: such an adapter "
                "is not read; merge it into the base with peft's merge_and_unload, and take that"
            )
        if module not in theirs:
            raise CheckpointError(
                f"{where} has an adapter for {module}, which the base (a {model_type}) does not have: give the base "
                "with which the adapter was trained"
            )


def _check_targets(settings: PeftSettings, modules: Mapping[str, ModuleSettings], *, where: str) -> None:
    for module in sorted(name for name, own in modules.items() if not own.is_named):
        raise CheckpointError(
            f"{where} has an adapter for {module}, which the target_modules of {settings.where} don't name, so "
            "that peft would leave it out: save the adapter again"
        )
    ends = {end for module in modules for end in ends_of(module)}
    for target in settings.targets if not isinstance(settings.targets, str) else ():
        if target not in ends:
            raise CheckpointError(
                f"{settings.where}: target_modules names {target}, for which {where} has no adapter: copy the folder "
                "again"
            )


def _check_saved(
    settings: PeftSettings,
    saved: Collection[str],
    model: ModelConfig,
    groups: Sequence[object],
    model_type: str,
    *,
    where: str,
) -> None:
    """Raise CheckpointError for a module of the model that was trained whole, and of which the folder has nothing."""
    names = [name for match in theirs_of(model, without_adapters(groups), model_type) for name in match.theirs]
    modules = {end for name in names for end in ends_of(name.rpartition(".")[0])}
    there = {end for name in saved for end in ends_of(name.rpartition(".")[0])}
    if lost := sorted({*settings.saved} & modules - there):
        raise CheckpointError(
            f"{settings.where}: modules_to_save names {listed(lost)}, of which {where} has no tensor: copy the folder "
            "again"
        )


def _pair(
    module: str,
    factors: tuple[LazyTensor, LazyTensor],
    theirs: TheirMatrix,
    own: ModuleSettings,
    settings: PeftSettings,
    where: str,
) -> _Pair:
    rank = own.rank
    for tensor, shape, end in zip(factors, ((rank, theirs.inputs), (theirs.rows, rank)), _FACTORS):
        if tensor.shape != shape:
            raise CheckpointError(
                f"{where}: {module}{end} is {list(tensor.shape)} and should be {list(shape)}, as rank {rank} of "
                f"{settings.where} and a weight [{theirs.rows}, {theirs.inputs}] of the base say: give the base beside "
                "which the adapter was trained"
            )
        if not tensor.dtype.is_floating_point:
            raise CheckpointError(f"{where}: {module}{end} is of type {tensor.dtype}, and an adapter has fp32 or bf16")
    a, b = (factor.make().float() for factor in factors)
    if not (a.isfinite().all() and b.isfinite().all()):
        raise CheckpointError(f"{where}: the adapter of {module} holds NaN or infinity: train it again")
    b = b * (own.scale / settings.scale)
    if not b.isfinite().all():
        raise CheckpointError(
            f"{settings.where}: the scale of {module} is {own.scale:g} and that of others {settings.scale:g}: times "
            "their quotient its adapter is no number of 32 bits; write another alpha_pattern"
        )
    return _Pair(a, b, theirs)


def _by_unit(pairs: Iterable[_Pair]) -> dict[Unit, tuple[Tensor, Tensor]]:
    """A pair for each of our matrices: one that is made of several of theirs has the ranks of all of them."""
    parts = defaultdict[Unit, list[tuple[Tensor, Tensor, Tensor]]](list)
    for pair in pairs:
        for number, unit in enumerate(pair.theirs.units):
            held = pair.theirs.owners == number
            parts[unit].append((pair.a, pair.b[held], pair.theirs.positions[held]))
    found = {}
    for unit, each in parts.items():
        rows = 1 + max(int(positions.max()) for *_, positions in each)
        b, first = torch.zeros(rows, sum(len(a) for a, *_ in each)), 0
        for a, own, positions in each:
            b[positions, first : first + len(a)] = own
            first += len(a)
        found[unit] = (torch.cat([a for a, *_ in each]), b)
    return found


def _lora(settings: PeftSettings, rank: int, units: Iterable[Unit]) -> LoraConfig:
    """Adapters of one rank, whose scale is that of most modules."""
    alpha = settings.alpha
    if rank != settings.rank:
        alpha = settings.scale * (math.sqrt(rank) if settings.rank_stabilized else rank)
    return LoraConfig(
        lora_rank=rank,
        lora_alpha=alpha,
        lora_targets=_targets(units),
        lora_rank_stabilized=settings.rank_stabilized,
        lora_dropout=settings.dropout,
    )


def _targets(units: Iterable[Unit]) -> tuple[str, ...]:
    """The names of ``--lora-targets`` for these matrices: parts of a layer where it has no others, else the layer."""
    parts = defaultdict[str, set[str]](set)
    for unit in units:
        parts[unit.layer.rpartition(".")[2]].add(unit.part)
    names: dict[tuple[str, str], str] = {}
    for name, place in LAYERS.items():
        names.setdefault(place, name)
    found = list[str]()
    for layer, own in sorted(parts.items()):
        aliases = [names.get((layer, part)) for part in sorted(own)]
        whole = own >= {"q", "k", "v"} or own >= {"gate", "up"} or None in aliases
        found += [layer] if whole else [alias for alias in aliases if alias is not None]
    return tuple(found)
