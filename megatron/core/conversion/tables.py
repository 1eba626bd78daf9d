"""Mapping tables: a row says which of their tensors make one of ours and how; used in both directions.

A table lists every row a family may have. Which of them a model has, its own parameters decide: a row whose name the
model doesn't know is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.core.conversion.portable import LazyTensor, parameters_of, report_differences
from megatron.core.conversion.transforms import Same, Transform

SAME = Same()
LAYER = re.compile(r"(\w+\.layers\.)(\d+)(\..*)")


@dataclass(frozen=True)
class Row:
    """``ours`` is made of ``theirs`` by ``transform``.

    ``{n}`` stands for the layer's number, in ``theirs`` also ``{before}`` for that of the layer before and ``{last}``
    for the last one's. A row for one layer, its number written out, goes before the row for all.
    """

    ours: str
    theirs: tuple[str, ...]
    transform: Transform = SAME


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
    rows = {row.ours: row for row in table}
    found, unnamed = [], []
    for name, sharding in parameters_of(model, groups).items():
        layer = LAYER.fullmatch(name)
        row = rows.get(name) or rows.get(f"{layer[1]}{{n}}{layer[3]}" if layer else name)
        if row is None:
            unnamed.append(name)
            continue
        number = int(layer[2]) if layer else 0
        numbers = {"n": number, "before": number - 1, "last": model.num_layers - 1}
        theirs = tuple(their.format(**numbers) for their in row.theirs)
        found.append(Match(name, theirs, row.transform, sharding.shape))
    report_differences(where, missing=[], surplus=unnamed, mismatched=[])
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
    asked = {name for match in found for name in match.theirs}
    missing = sorted(asked - theirs.keys())
    surplus = sorted(name for name in theirs.keys() - asked if not ignored(name))
    mismatched = [problem for match in found for problem in _shape_problems(match, theirs, model)]
    report_differences(where, missing=missing, surplus=surplus, mismatched=mismatched)
    return {match.ours: _joined(match, theirs, model) for match in found}


def to_theirs(found: Sequence[Match], ours: Mapping[str, LazyTensor], model: ModelConfig) -> dict[str, LazyTensor]:
    """Their tensors in the order of our parameters, each made of ours when it is wanted."""
    made: dict[str, LazyTensor] = {}
    for match in found:
        tensor = ours[match.ours]
        shapes = [tuple(part.shape) for part in match.transform.split(_without_numbers(tensor.shape), model)]
        parts = _Parts(match, tensor, model)
        for number, (name, shape) in enumerate(zip(match.theirs, shapes)):
            made[name] = LazyTensor(shape, tensor.dtype, parts.maker(number))
    return made


class _Parts:
    """The parts of one of our tensors, which is read once when they are asked for in their order."""

    def __init__(self, match: Match, tensor: LazyTensor, model: ModelConfig) -> None:
        self._match, self._tensor, self._model = match, tensor, model
        self._waiting: dict[int, Tensor] = {}

    def maker(self, number: int) -> Callable[[], Tensor]:
        """What makes part ``number``."""

        def make() -> Tensor:
            if number not in self._waiting:
                split = self._match.transform.split(self._tensor.make(), self._model)
                self._waiting = dict(enumerate(split))
            return self._waiting.pop(number)

        return make


def _joined(match: Match, theirs: Mapping[str, LazyTensor], model: ModelConfig) -> LazyTensor:
    sources = [theirs[name] for name in match.theirs]
    dtype = sources[0].dtype
    for source in sources[1:]:
        dtype = torch.promote_types(dtype, source.dtype)

    def make() -> Tensor:
        return match.transform.join([source.make() for source in sources], model)

    return LazyTensor(match.shape, dtype, make)


def _shape_problems(match: Match, theirs: Mapping[str, LazyTensor], model: ModelConfig) -> list[str]:
    expected = match.transform.split(_without_numbers(match.shape), model)
    return [
        f"{name} is {list(theirs[name].shape)} and should be {list(part.shape)}"
        for name, part in zip(match.theirs, expected)
        if name in theirs and theirs[name].shape != tuple(part.shape)
    ]


def _without_numbers(shape: Collection[int]) -> Tensor:
    return torch.empty(tuple(shape), device="meta")
