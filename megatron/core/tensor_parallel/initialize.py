"""Initial weights as a function of (seed, parameter name) alone: the same model at every layout, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rng import derive_seed
from megatron.core.parallel.sharding import Sharding, sharded_parameters

_BLOCK_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Constant:
    """Every element is ``value``."""

    value: float


@dataclass(frozen=True)
class Normal:
    """Elements are drawn from a normal distribution of mean 0 and standard deviation ``std``."""

    std: float


@dataclass(frozen=True)
class Uniform:
    """Elements are drawn between ``low`` and ``high``; ``transform``: what becomes of each of them."""

    low: float
    high: float
    transform: Callable[[Tensor], Tensor] | None = None


Initialization = Constant | Normal | Uniform


def initialize(module: nn.Module, mesh: Mesh, *, seed: int) -> None:
    """Fill every parameter of ``module``; vocabulary padding becomes zero."""
    initialize_parameters(sharded_parameters(module), mesh, seed=seed)


def initialize_parameters(parameters: Iterable[tuple[str, nn.Parameter, Sharding]], mesh: Mesh, *, seed: int) -> None:
    """Fill parameters that say how they are initialized, given with their names and layouts. Those without memory are
    left to ``build_buffers``.
    """
    for name, tensor, sharding in parameters:
        if has_values(tensor):
            draw(tensor, name, sharding, tensor.initialization, mesh, seed=seed)  # type: ignore[attr-defined]


def has_values(parameter: Tensor) -> bool:
    """Whether a parameter has memory; see ``ParallelContext.fills_weights_later``."""
    return parameter.numel() == 0 or parameter.untyped_storage().nbytes() > 0


@torch.no_grad()
def draw(
    tensor: Tensor, name: str, sharding: Sharding, initialization: Initialization, mesh: Mesh, *, seed: int
) -> None:
    """Fill this rank's part of the parameter ``name`` with initial values.

    They are drawn on the CPU in fp32, in blocks of rows with a seed each, so a rank draws little more than it holds.
    """
    if isinstance(initialization, Constant):
        tensor.fill_(initialization.value)
        return
    tensor.zero_()
    own_seed = derive_seed(seed, sharding.tied or name)
    for piece in sharding.pieces(mesh):
        first, count = piece.logical[0], piece.sizes[0]
        columns = piece.slices(of_local=False)[1:]
        blocks = _drawn_rows(sharding.shape, first, first + count, initialization, seed=own_seed)
        for start, block in blocks:
            target = piece.local[0] + start - first
            destination = tensor[(slice(target, target + len(block)), *piece.slices(of_local=True)[1:])]
            destination.copy_(block[(slice(None), *columns)])


def _drawn_rows(
    shape: tuple[int, ...], start: int, stop: int, drawn: Normal | Uniform, *, seed: int
) -> Iterator[tuple[int, Tensor]]:
    """Rows ``[start, stop)`` of the random tensor of ``shape``, as (first row, values) of each block of rows."""
    rows = max(1, _BLOCK_ELEMENTS // max(1, math.prod(shape[1:])))
    for number in range(start // rows, -(-stop // rows)):
        first = number * rows
        generator = torch.Generator().manual_seed(derive_seed(seed, number))
        block = torch.empty(min(rows, shape[0] - first), *shape[1:], dtype=torch.float32)
        if isinstance(drawn, Normal):
            block.normal_(0.0, drawn.std, generator=generator)
        else:
            block.uniform_(drawn.low, drawn.high, generator=generator)
            block = block if drawn.transform is None else drawn.transform(block)
        yield max(start, first), block[max(0, start - first) : stop - first]
