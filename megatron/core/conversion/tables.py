"""Mapping tables: a row names the modules of theirs that make one of ours, and how; used in both directions.

A table lists all modules that a family may have. The model's own parameters decide which of them, and which of their
tensors, a model has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.core.checkpointing.manifest import listed
from megatron.core.conversion.portable import LazyTensor, check_shapes, parameters_of
from megatron.core.conversion.transforms import SAME, Transform
from megatron.core.parallel.sharding import Sharding
from megatron.errors import CheckpointError

LAYER = re.compile(r"([\w.]+?\.layers\.)(\d+)(\..*)")


@dataclass(frozen=True)
class Row:
    """The module ``ours`` is made of ``theirs``, one or several, by ``transform``: its weight, its bias and so on.

    ``{n}`` stands for the layer's number, in ``theirs`` also ``{before}`` for that of the layer before, ``{last}`` for
    the last one's, ``{beyond}`` for one after the last and ``{pair}`` for that of the layer which two of ours make. A
    row for one layer, its number written out, goes before the row for all. ``is_parameter``: both sides name single
    parameters, not modules.
    """

    ours: str
    theirs: str | tuple[str, ...]
    transform: Transform = SAME
    is_parameter: bool = False


@dataclass(frozen=True)
class Match:
    """A row applied to one parameter of a model."""

    ours: str
    theirs: tuple[str, ...]
    transform: Transform
    shape: tuple[int, ...]


def matches(table: Sequence[Row], model: ModelConfig, groups: Sequence[object] = (), *, where: str) -> list[Match]:
    """The table's rows for the parameters of ``model``, in their order; CheckpointError for one without a row.

    ``groups``: settings of its family alone.
    """
    return matches_of(parameters_of(model, groups), table, model, where=where)


def matches_of(
    parameters: Mapping[str, Sharding], table: Sequence[Row], model: ModelConfig, *, where: str
) -> list[Match]:
    """The table's rows for ``parameters`` of ``model``, as ``matches``."""
    rows = {row.ours: row for row in table}
    found, unnamed = [], []
    for name, sharding in parameters.items():
        layer = LAYER.fullmatch(name)
        parameter = f"{layer[1]}{{n}}{layer[3]}" if layer else name
        module, _, kind = name.rpartition(".")
        row = rows.get(name) or rows.get(parameter) or rows.get(module) or rows.get(parameter.rpartition(".")[0])
        if row is None:
            unnamed.append(name)
            continue
        number = int(layer[2]) if layer else 0
        numbers = {"n": number, "before": number - 1, "last": model.num_layers - 1}
        numbers |= {"beyond": model.num_layers + number, "pair": number // 2}
        modules = (row.theirs,) if isinstance(row.theirs, str) else row.theirs
        theirs = tuple(their.format(**numbers) for their in modules)
        theirs = theirs if row.is_parameter else tuple(f"{their}.{kind}" for their in theirs)
        found.append(Match(name, theirs, row.transform, sharding.shape))
    if unnamed:
        raise CheckpointError(
            f"{where} cannot be converted: its format has no names for {listed(unnamed)}; only a mapping table with "
            "rows for these tensors can convert such a model"
        )
    return found


def to_ours(
    found: Sequence[Match],
    theirs: Mapping[str, LazyTensor],
    model: ModelConfig,
    *,
    where: str,
    ignored: Callable[[str], bool] = lambda name: False,
) -> dict[str, LazyTensor]:
    """Our tensors, each read from ``theirs`` when it is wanted.

    ``ignored``: names that no model needs. Raises CheckpointError for tensors that are missing, left over, or of
    another shape, before any is read.
    """
    wanted = {
        name: part.shape
        for match in found
        for name, part in zip(match.theirs, match.transform.split(_without_numbers(match.shape), model))
    }
    held = {name: tensor.shape for name, tensor in theirs.items() if name in wanted or not ignored(name)}
    check_shapes(held, wanted, where=where)
    for match in found:
        dtypes = {name: theirs[name].dtype for name in match.theirs}
        if len(set(dtypes.values())) > 1:  # the way back couldn't tell apart which part had which
            listed = ", ".join(f"{name} is {str(dtype).removeprefix('torch.')}" for name, dtype in dtypes.items())
            raise CheckpointError(f"{where}: {listed}; they make one tensor here, so save them in one type")
    return {match.ours: _joined(match, theirs, model) for match in found}


def to_theirs(found: Sequence[Match], ours: Mapping[str, LazyTensor], model: ModelConfig) -> dict[str, LazyTensor]:
    """Tensors under their other names, in the order of our parameters, each made of ours when it is read.

    One of ours is read once when its parts are asked for in their order.
    """
    made: dict[str, LazyTensor] = {}
    for match in found:
        tensor = ours[match.ours]
        shapes = [tuple(part.shape) for part in match.transform.split(_without_numbers(tensor.shape), model)]
        waiting: dict[str, Tensor] = {}
        for name, shape in zip(match.theirs, shapes):
            make = partial(_part, name, match, tensor, model, waiting)
            made[name] = LazyTensor(shape, tensor.dtype, make)
    return made


def _part(name: str, match: Match, tensor: LazyTensor, model: ModelConfig, waiting: dict[str, Tensor]) -> Tensor:
    if name not in waiting:
        waiting.update(zip(match.theirs, match.transform.split(tensor.make(), model)))
    return waiting.pop(name)


def _joined(match: Match, theirs: Mapping[str, LazyTensor], model: ModelConfig) -> LazyTensor:
    sources = [theirs[name] for name in match.theirs]

    def make() -> Tensor:
        return match.transform.join([source.make() for source in sources], model)

    return LazyTensor(match.shape, sources[0].dtype, make)


def _without_numbers(shape: Collection[int]) -> Tensor:
    return torch.empty(tuple(shape), device="meta")
