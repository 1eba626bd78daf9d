"""Which rows of another program's matrices belong to which of our matrices that may have an adapter.

The mapping tables of published types say it already, for whole weights. They are asked with numbered rows, so that what
a transform does to heads, pairs and experts needs no second description.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.config.lora import without_adapters
from megatron.config.model import ModelConfig
from megatron.core.conversion.huggingface.writing import theirs_of
from megatron.core.conversion.portable import parameters_of
from megatron.core.conversion.tables import Match
from megatron.core.parallel.matrices import LogicalMatrix
from megatron.core.parallel.sharding import Sharding
from megatron.core.tensor_parallel.low_rank import WHOLE, matrices_of

_WIDTH = 3  # columns of the numbered matrices that transforms move


@dataclass(frozen=True)
class Unit:
    """A matrix of ours that may have a pair. ``layer``: the linear layer. ``part``: its name there. ``expert``: which
    one's it is, where the layer is of experts.
    """

    layer: str
    part: str
    expert: int | None = None

    def parameter(self, factor: str) -> str:
        """The name of the parameter of a factor, "a" or "b"."""
        return f"{self.layer}.lora.{self.part}.{factor}.weight"


@dataclass(frozen=True)
class TheirMatrix:
    """A matrix of a published model: each of its rows is row ``positions`` of unit number ``owners`` of ``units``.

    ``inputs``: columns. ``is_transposed``: whether files hold it as [in, out].
    """

    units: Sequence[Unit]
    owners: Tensor
    positions: Tensor
    inputs: int
    is_transposed: bool

    @property
    def rows(self) -> int:
        """Number of outputs."""
        return len(self.owners)


def their_matrices(
    model: ModelConfig, groups: Sequence[object], model_type: str
) -> tuple[dict[str, TheirMatrix], dict[str, str]]:
    """The matrices of a published model by module, and modules whose rows are no rows of ours, with our parameter."""
    plain = without_adapters(groups)
    layouts = parameters_of(model, plain)
    found, others = dict[str, TheirMatrix](), dict[str, str]()
    sorted_already: dict[tuple[object, ...], list[tuple[Tensor, bool] | None]] = {}
    for match in theirs_of(model, plain, model_type):
        if not match.ours.endswith(".weight") or len(match.shape) < 2:
            continue
        layout, key = layouts[match.ours], (match.transform, match.shape[:-1])
        if key not in sorted_already:
            sorted_already[key] = _rows(match, model)
        units, owners, positions = units_of(match.ours.removesuffix(".weight"), layout)
        for name, rows in zip(match.theirs, sorted_already[key], strict=True):
            module = name.removesuffix(".weight")
            if rows is None:
                others[module] = match.ours
                continue
            held, is_transposed = rows
            kinds = torch.tensor(sorted({*owners[held].tolist()}))
            local = torch.searchsorted(kinds, owners[held])
            inside = [units[number] for number in kinds.tolist()]
            found[module] = TheirMatrix(inside, local, positions[held], match.shape[-1], is_transposed)
    return found, others


def units_of(layer: str, layout: Sharding) -> tuple[list[Unit], Tensor, Tensor]:
    """The matrices of a linear layer, and for each row of all of them, [rows], which one it is in and where."""
    *stacked, outputs, _ = layout.shape
    if stacked:
        parts = ("gate", "up") if stacked[1:] == [2] else (WHOLE,)
        units = [Unit(layer, part, expert) for expert in range(stacked[0]) for part in parts]
        return units, torch.arange(len(units)).repeat_interleave(outputs), torch.arange(outputs).repeat(len(units))
    matrices = matrices_of(layout)
    owners, positions = torch.zeros(2, outputs, dtype=torch.long)
    for number, matrix in enumerate(matrices.values()):
        rows = rows_of(matrix)
        owners[rows], positions[rows] = number, torch.arange(len(rows))
    return [Unit(layer, part) for part in matrices], owners, positions


def rows_of(matrix: LogicalMatrix) -> Tensor:
    """The rows of a stacked weight that belong to a matrix of it, in the matrix's order."""
    return torch.cat([torch.arange(first, first + count) for first, count in matrix.runs])


def _rows(match: Match, model: ModelConfig) -> list[tuple[Tensor, bool] | None]:
    """The rows of ours that each of their matrices has, and whether it is transposed; None for other tensors."""
    *lead, _ = match.shape
    numbered = torch.arange(math.prod(lead) * _WIDTH).view(*lead, _WIDTH)
    try:
        parts = match.transform.split(numbered, model)
    except (RuntimeError, IndexError, ValueError):  # one that moves columns, too
        return [None] * len(match.theirs)
    return [_numbers(part) for part in parts]


def _numbers(part: Tensor) -> tuple[Tensor, bool] | None:
    if part.dim() != 2:
        return None
    for each, is_transposed in ((part, False), (part.t(), True)):
        first = each[:, :1]
        is_whole = each.shape[1] == _WIDTH and bool((first % _WIDTH == 0).all())
        if is_whole and torch.equal(each, first + torch.arange(_WIDTH)):
            return first[:, 0] // _WIDTH, is_transposed
    return None


Pairs = Mapping[Unit, tuple[Tensor, Tensor]]
"""The factors of units, ``a`` [r, in] and ``b`` [out, r]."""


def without_experts(unit: Unit) -> Unit:
    """The unit that stands for those of all experts, whose factors are stacked in one parameter."""
    return replace(unit, expert=None)
