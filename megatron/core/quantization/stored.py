"""Frozen weights that stay in the bits of their grid while what is beside them is trained.

A product asks for its weight in both passes; it is then made of codes and scales, and is not kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from megatron.core.parallel.operands import Operands
from megatron.core.quantization.grid import Grid
from megatron.core.quantization.packing import PACKED_BITS, packed, signed, unpacked


@dataclass(frozen=True)
class StoredWeight:
    """A rank's part of a weight, ``[out, in]``. ``codes``: int8, E4M3, or packed in int32 words. ``factors``,
    ``zeros``: a number for each row and group of inputs, ``[out, groups]``. ``groups``: the group of each input, [in].
    ``dtype``: the type to which files have rounded the numbers.
    """

    grid: Grid
    inputs: int
    codes: Tensor
    factors: Tensor
    zeros: Tensor | None
    groups: Tensor | None
    dtype: torch.dtype

    @classmethod
    def of(
        cls, codes: Tensor, grid: Grid, factors: Tensor, zeros: Tensor | None, groups: Tensor | None, dtype: torch.dtype
    ) -> StoredWeight:
        """The weight of these codes, int8 or E4M3 ``[out, in]``, in as few bits as words of files have."""
        is_packed = grid.kind == "int" and grid.bits < 8 and grid.bits in PACKED_BITS
        kept = packed(codes, grid.bits) if is_packed else codes
        return cls(grid, codes.shape[1], kept, factors, zeros, groups, dtype)

    @property
    def nbytes(self) -> int:
        """Memory of codes and scales."""
        held = (self.codes, self.factors, self.zeros, self.groups)
        return sum(each.nbytes for each in held if each is not None)

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """The weight as numbers of ``dtype``, those that its files hold."""
        codes = self.codes
        if codes.dtype == torch.int32:
            codes = signed(unpacked(codes, self.grid.bits, self.inputs), self.grid.bits)
        found = codes.float()
        if self.zeros is not None:
            found.sub_(self._spread(self.zeros.float()))
        return found.mul_(self._spread(self.factors.float())).to(self.dtype).to(dtype)

    def _spread(self, found: Tensor) -> Tensor:
        """``[out, groups]`` to a number for each input; one column stays one."""
        if found.shape[1] == 1:
            return found
        if self.groups is not None:
            return found[:, self.groups]
        return found.repeat_interleave(self.grid.block[1], 1)[:, : self.inputs]


class StoredWeights(Operands):
    """Operands among which some frozen weights are made of their codes whenever they are asked for."""

    replaces = True
    replaces_trained = False

    def __init__(self) -> None:
        self._held: dict[Tensor, StoredWeight] = {}

    def hold(self, weight: Tensor, stored: StoredWeight) -> None:
        """Keep a weight as its codes, and give up the memory of its numbers."""
        self._held[weight] = stored
        weight.data = weight.new_full((), math.nan).expand(weight.shape)

    @property
    def nbytes(self) -> int:
        """Memory of all weights that are held."""
        return sum(each.nbytes for each in self._held.values())

    @override
    def weight(self, weight: Tensor) -> Callable[[], Tensor]:
        """The weight, of its codes where it is held as such."""
        stored = self._held.get(weight)
        return weight.detach if stored is None else partial(stored.numbers, weight.dtype)
