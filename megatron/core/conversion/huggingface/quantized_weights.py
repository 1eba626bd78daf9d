"""A quantized weight of published files: codes and scales, whatever the layout, and the numbers they stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron.core.conversion.portable import LazyScales, LazyTensor
from megatron.core.quantization.grid import Grid

Codes = Callable[[], Tensor]


@dataclass(frozen=True)
class StoredWeight:
    """A weight ``[out, in]`` on a grid. ``codes``: reads ``[out, in]``. ``scales``: a row for each output; their type
    is the one in which codes are multiplied.
    """

    shape: tuple[int, int]
    grid: Grid
    codes: Codes
    scales: LazyScales

    def values(self, dtype: torch.dtype) -> LazyTensor:
        """The numbers that the codes stand for, as ``dtype``."""
        return LazyTensor(self.shape, dtype, partial(self._make, dtype))

    def _make(self, dtype: torch.dtype) -> Tensor:
        factors = self.scales.factors.make()
        places = self.places()
        codes = self.codes().to(factors.dtype)
        if self.scales.zeros is not None:
            codes = codes - _spread(self.scales.zeros.make().to(factors.dtype), places)
        return (codes * _spread(factors, places)).to(dtype)

    def places(self) -> Tensor | None:
        """The group of each input, ``[in]``; None where an output has one scale."""
        if self.scales.groups is not None:
            return self.scales.groups.make().long()
        group = self.grid.block[1]
        return torch.arange(self.shape[1]) // group if group else None


def _spread(found: Tensor, places: Tensor | None) -> Tensor:
    return found if places is None or found.shape[1] == 1 else found[:, places]


def rows_of(factors: LazyTensor, rows: int, sharing: int) -> LazyTensor:
    """Factors ``[rows, groups]`` of ``[⌈rows/sharing⌉, groups]``; of one number, or ``[rows]``, a column."""
    count = factors.shape[-1] if len(factors.shape) == 2 else 1

    def make() -> Tensor:
        found = factors.make()
        found = found.reshape(-1, count)
        return found.repeat_interleave(sharing, 0)[:rows] if sharing > 1 else found.expand(rows, count)

    return LazyTensor((rows, count), factors.dtype, make)
