"""The one description of which part of a logical parameter a rank holds, and over which ranks its gradient is summed.

Initialization, gradient sync, gradient norm, checkpoints and converters all read it here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from megatron.core.parallel.grid import Axis
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.stacked_rows import RowRun, UndividedError, runs_of_parts
from megatron.core.parallel.stacked_rows import SharedRows as SharedRows
from megatron.core.parallel.stacked_rows import StackedPart as StackedPart
from megatron.errors import ConfigError

_MOST_NUMBERS = 1 << 60  # of a weight: as bytes of fp64 they still have addresses

Offsets = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A rectangle that a local tensor and its logical tensor share: same ``sizes``, different offsets."""

    logical: Offsets
    local: Offsets
    sizes: Offsets

    def slices(self, *, of_local: bool) -> tuple[slice, ...]:
        """Index expression of this rectangle in the local or in the logical tensor."""
        starts = self.local if of_local else self.logical
        return tuple(slice(start, start + size) for start, size in zip(starts, self.sizes))


@dataclass(frozen=True)
class SharedRange:
    """Flat range ``[start, stop)`` of a local tensor that ``sharers`` neighbouring ranks of the split axis hold."""

    start: int
    stop: int
    sharers: int


@dataclass(frozen=True)
class Sharding:
    """Layout of one parameter.

    ``shape``: logical shape, without vocabulary padding.
    ``split``: dimension -> axis that splits it, e.g. ``{0: "tp"}``; experts ``{0: "ep", 1: "etp"}``.
    ``parts``: matrices stacked on the split dimension, in logical order, each split or shared separately (gate and up
    of a gated MLP are two equal parts); none: one matrix.
    ``pad_multiple``: the split dimension is padded up to a multiple of ``pad_multiple * ranks`` before it is divided,
    None: not padded; padding belongs to local tensors only, never to the logical one.
    ``partial_grad``: axes on which each rank computes only part of the gradient, so that it must be summed over them.
    ``tied``: name shared by copies of one logical parameter on several pipeline stages.
    ``reduce``: axes over which replicas of the parameter process different data, where gradients are summed.
    ``shared``: rows of the split dimension 0 that ranks share rather than divide.
    ``kind``: what its numbers of dimensions don't say: "table" of the vectors of words, positions or channels, which is
    no matrix between two widths of a model, or "vector", such as the stacked biases of experts.
    """

    shape: tuple[int, ...]
    split: Mapping[int, Axis] = field(default_factory=dict)
    parts: tuple[StackedPart, ...] = ()
    pad_multiple: int | None = None
    partial_grad: tuple[Axis, ...] = ()
    tied: str | None = None
    reduce: tuple[Axis, ...] = ("dp", "cp")
    shared: SharedRows | None = None
    kind: Literal["table", "vector"] | None = None

    def __post_init__(self) -> None:
        if self.parts:
            if len(self.split) != 1 or self.pad_multiple is not None:
                raise ValueError("stacked parts need exactly one split dimension and no padding")
            (dim,) = self.split
            if sum(part.rows for part in self.parts) != self.shape[dim]:
                raise ValueError(f"{self.parts} do not add up to dimension {dim} of shape {self.shape}")
            if dim != 0 and any(part.groups is not None for part in self.parts):
                raise ValueError("parts with shared rows need dimension 0 split")
        if self.shared is not None and (tuple(self.split) != (0,) or self.parts or self.pad_multiple is not None):
            raise ValueError("shared rows need dimension 0 split, and neither stacked parts nor padding")

    def padded_size(self, dim: int, mesh: Mesh) -> int:
        """Extent of ``dim`` over all ranks together, padding included."""
        if dim not in self.split or self.pad_multiple is None:
            return self.shape[dim]
        unit = self.pad_multiple * mesh.size(self.split[dim])
        return math.ceil(self.shape[dim] / unit) * unit

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """Shape of the tensor this rank holds, padding included.

        Raises ValueError when a dimension is not divisible; configuration rules catch that earlier for users.
        """
        local = list(self.shape)
        for dim, axis in self.split.items():
            if self.parts or self.shared is not None:
                local[dim] = sum(run.rows for run in self._runs(dim, mesh))
                continue
            ranks, size = mesh.size(axis), self.padded_size(dim, mesh)
            if size % ranks:
                raise ValueError(f"dimension {dim} of shape {self.shape} is not divisible by {axis}={ranks}")
            local[dim] = size // ranks
        return tuple(local)

    def pieces(self, mesh: Mesh) -> tuple[Piece, ...]:
        """Rectangles of the logical tensor that this rank holds; vocabulary padding is left out."""
        return tuple(piece for piece, _ in self._shared_pieces(mesh))

    def counted_pieces(self, mesh: Mesh) -> tuple[Piece, ...]:
        """The pieces that this rank counts in a sum over all model-parallel ranks: replicas count once."""
        if not self.gradient_owner(mesh):
            return ()
        found = self._shared_pieces(mesh)
        return tuple(piece for piece, sharers in found if sharers == 1 or self._rank(mesh) % sharers == 0)

    def local_elements(self, mesh: Mesh) -> int:
        """Elements of the logical tensor that this rank holds."""
        return sum(math.prod(piece.sizes) for piece in self.pieces(mesh))

    def counted_elements(self, mesh: Mesh) -> int:
        """Elements of the logical tensor that this rank counts; over a model's ranks they add up to all."""
        return sum(math.prod(piece.sizes) for piece in self.counted_pieces(mesh))

    def shared_ranges(self, mesh: Mesh) -> tuple[SharedRange, ...]:
        """Flat ranges of the local tensor that are shared with other ranks; neighbouring ones are one range."""
        if not self.parts and self.shared is None:
            return ()
        found, row = list[SharedRange](), math.prod(self.shape[1:])
        for piece, sharers in self._shared_pieces(mesh):
            start, stop = piece.local[0] * row, (piece.local[0] + piece.sizes[0]) * row
            if sharers > 1 and found and (found[-1].stop, found[-1].sharers) == (start, sharers):
                found[-1] = SharedRange(found[-1].start, stop, sharers)
            elif sharers > 1:
                found.append(SharedRange(start, stop, sharers))
        return tuple(found)

    def _rank(self, mesh: Mesh) -> int:
        """This rank's number on the only split axis."""
        (axis,) = self.split.values()
        return mesh.rank(axis)

    def _shared_pieces(self, mesh: Mesh) -> list[tuple[Piece, int]]:
        """The rank's pieces, each with the number of neighbouring ranks that hold it."""
        local_shape = self.local_shape(mesh)
        starts, sizes = [0] * len(self.shape), list(self.shape)
        if self.parts or self.shared is not None:
            (dim,) = self.split
            found, local = list[tuple[Piece, int]](), [0] * len(self.shape)
            for run in self._runs(dim, mesh):
                starts[dim], sizes[dim] = run.start, run.rows
                found.append((Piece(tuple(starts), tuple(local), tuple(sizes)), run.sharers))
                local[dim] += run.rows
            return [each for each in found if 0 not in each[0].sizes]
        for dim, axis in self.split.items():
            starts[dim] = local_shape[dim] * mesh.rank(axis)
            sizes[dim] = max(0, min(local_shape[dim], self.shape[dim] - starts[dim]))
        return [] if 0 in sizes else [(Piece(tuple(starts), (0,) * len(starts), tuple(sizes)), 1)]

    def _runs(self, dim: int, mesh: Mesh) -> list[RowRun]:
        """Rows of ``dim`` that this rank holds of stacked parts or of groups with shared rows, in local order."""
        axis = self.split[dim]
        ranks, rank = mesh.size(axis), mesh.rank(axis)
        try:
            if self.shared is None:
                return runs_of_parts(self.parts, ranks=ranks, rank=rank)
            return self.shared.runs(self.shape[dim], ranks=ranks, rank=rank)
        except UndividedError as error:
            raise ValueError(f"{error} of shape {self.shape} is not divisible by {axis}={ranks}") from None

    def gradient_owner(self, mesh: Mesh) -> bool:
        """Whether this rank counts the parameter in a sum over all model-parallel ranks (replicas count once)."""
        axes = ("etp", "ep") if {"etp", "ep"} & set(self.split.values()) else ("tp",)
        return all(mesh.rank(axis) == 0 for axis in axes if axis not in self.split.values())  # type: ignore[arg-type]


def sharded_parameter(sharding: Sharding, mesh: Mesh, *, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """An uninitialized parameter that carries its layout; see ``tensor_parallel.initialize`` for its values.

    Raises ConfigError for one of more numbers than any memory has addresses.
    """
    if math.prod(sharding.shape) >= _MOST_NUMBERS:
        sizes = " x ".join(f"{size:,}" for size in sharding.shape)
        raise ConfigError(
            f"the settings describe a weight of {sizes} numbers, more than any memory has; lower its sizes"
        )
    parameter = nn.Parameter(torch.empty(sharding.local_shape(mesh), dtype=dtype, device=device))
    parameter.sharding = sharding  # type: ignore[attr-defined]
    return parameter


def sharding_of(parameter: Tensor) -> Sharding:
    """Layout of ``parameter``; a parameter made without ``sharded_parameter`` is a programming error."""
    sharding = getattr(parameter, "sharding", None)
    assert isinstance(sharding, Sharding), "a parameter without Sharding: create it with sharded_parameter()"
    return sharding


def sharded_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, Sharding]]:
    """Every parameter of ``module`` with its global name and its layout."""
    for name, parameter in module.named_parameters():
        yield name, parameter, sharding_of(parameter)


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that are part of a module's state, such as the running statistics of a BatchNorm, by global name."""
    for place, each in module.named_modules():
        for name, buffer in each._buffers.items():
            if buffer is not None and name not in each._non_persistent_buffers_set:
                yield (f"{place}.{name}" if place else name), buffer


@dataclass(frozen=True)
class ShardedState:
    """A named local tensor that is part of a logical tensor: what checkpoints save and load, whatever the layout.

    ``tensor`` is the whole local shard, or, with ``flat_range``, the 1-D slice ``[start, stop)`` of its flattening
    (the range of a parameter's optimizer state that this rank owns). Loading writes into ``tensor`` in place, and then
    calls ``after_load``, which brings the numbers to where they are kept in another format.
    """

    name: str
    tensor: Tensor
    sharding: Sharding
    flat_range: tuple[int, int] | None = None
    after_load: Callable[[], None] | None = None
