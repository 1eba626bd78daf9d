"""Initial weights as a function of (seed, parameter name) alone: the same model at every layout, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rng import derive_seed
from megatron.core.parallel.sharding import Sharding, sharded_parameter, sharded_parameters

_BLOCK_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Constant:
    """Every element is ``value``."""

    value: float


@dataclass(frozen=True)
class Normal:
    """Elements are drawn from a normal distribution of mean 0 and standard deviation ``std``."""

    std: float


Initialization = Constant | Normal


def parameter(
    sharding: Sharding, initialization: Initialization, mesh: Mesh, *, dtype: torch.dtype, device: torch.device
) -> nn.Parameter:
    """A parameter that knows its layout and how its first values are made; ``initialize`` makes them."""
    made = sharded_parameter(sharding, mesh, dtype=dtype, device=device)
    made.initialization = initialization  # type: ignore[attr-defined]
    return made


@torch.no_grad()
def initialize(module: nn.Module, mesh: Mesh, *, seed: int) -> None:
    """Fill every parameter of ``module``; vocabulary padding becomes zero.

    Values are drawn on the CPU in fp32, in blocks of rows with a seed each, so a rank draws little more than it holds.
    """
    for name, tensor, sharding in sharded_parameters(module):
        initialization: Initialization = tensor.initialization  # type: ignore[attr-defined]
        if isinstance(initialization, Constant):
            tensor.fill_(initialization.value)
            continue
        tensor.zero_()
        rows = _RowBlocks(sharding.shape, initialization.std, derive_seed(seed, sharding.tied or name))
        for piece in sharding.pieces(mesh):
            first, count = piece.logical[0], piece.sizes[0]
            columns = piece.slices(of_local=False)[1:]
            for start, block in rows.blocks(first, first + count):
                target = piece.local[0] + start - first
                destination = tensor[(slice(target, target + len(block)), *piece.slices(of_local=True)[1:])]
                destination.copy_(block[(slice(None), *columns)])


class _RowBlocks:
    """A logical normal tensor that can be drawn a few rows at a time."""

    def __init__(self, shape: tuple[int, ...], std: float, seed: int) -> None:
        self._shape, self._std, self._seed = shape, std, seed
        self._rows = max(1, _BLOCK_ELEMENTS // max(1, math.prod(shape[1:])))

    def blocks(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Rows ``[start, stop)`` as (first row, values) parts."""
        for number in range(start // self._rows, -(-stop // self._rows)):
            first = number * self._rows
            yield max(start, first), self._draw(number)[max(0, start - first) : stop - first]

    def _draw(self, number: int) -> Tensor:
        rows = min(self._rows, self._shape[0] - number * self._rows)
        generator = torch.Generator().manual_seed(derive_seed(self._seed, number))
        return torch.empty(rows, *self._shape[1:], dtype=torch.float32).normal_(0.0, self._std, generator=generator)
