"""The one description of which part of a logical parameter a rank holds, and over which ranks its gradient is summed.

Initialization, gradient sync, gradient norm, checkpoints and converters all read it here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megatron.core.parallel.grid import Axis
from megatron.core.parallel.mesh import Mesh

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
class SharedRows:
    """Dimension 0 consists of ``groups`` equal groups of rows; the last ``rows`` of a group cannot be divided.

    With more ranks than groups, the ranks of a group divide its first rows and each hold its last ones: a key/value
    head that serves query heads of several ranks. The gradient of shared rows is partial on each of them.
    """

    groups: int
    rows: int


@dataclass(frozen=True)
class Sharding:
    """Layout of one parameter.

    ``shape``: logical shape, without vocabulary padding.
    ``split``: dimension -> axis that splits it, e.g. ``{0: "tp"}``; experts ``{0: "ep", 1: "etp"}``.
    ``blocks``: equal matrices stacked on the split dimension, each split separately (gate and up of a gated MLP: 2).
    ``pad_multiple``: the split dimension is padded up to a multiple of ``pad_multiple * ranks`` before it is divided,
    None: not padded; padding belongs to local tensors only, never to the logical one.
    ``partial_grad``: axes on which each rank computes only part of the gradient, so that it must be summed over them.
    ``tied``: name shared by copies of one logical parameter on several pipeline stages.
    ``reduce``: axes over which replicas of the parameter process different data, where gradients are summed.
    ``shared``: rows of the split dimension 0 that ranks share rather than divide.
    """

    shape: tuple[int, ...]
    split: Mapping[int, Axis] = field(default_factory=dict)
    blocks: int = 1
    pad_multiple: int | None = None
    partial_grad: tuple[Axis, ...] = ()
    tied: str | None = None
    reduce: tuple[Axis, ...] = ("dp", "cp")
    shared: SharedRows | None = None

    def __post_init__(self) -> None:
        if self.blocks > 1 and (len(self.split) != 1 or self.pad_multiple is not None):
            raise ValueError("stacked blocks need exactly one split dimension and no padding")
        if self.shared is not None and (tuple(self.split) != (0,) or self.blocks > 1 or self.pad_multiple is not None):
            raise ValueError("shared rows need dimension 0 split, and neither stacked blocks nor padding")

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
        sharers = self.sharers(mesh)
        if self.shared is not None and sharers > 1:
            divided = self.shape[0] // self.shared.groups - self.shared.rows
            if mesh.size(self.split[0]) % self.shared.groups or divided % sharers:
                raise ValueError(f"{self.shared} of shape {self.shape} do not fit {mesh.size(self.split[0])} ranks")
            return (divided // sharers + self.shared.rows, *self.shape[1:])
        for dim, axis in self.split.items():
            ranks, size = mesh.size(axis), self.padded_size(dim, mesh)
            if size % (ranks * self.blocks):
                raise ValueError(
                    f"dimension {dim} of shape {self.shape} ({self.blocks} blocks) is not divisible by {axis}={ranks}"
                )
            local[dim] = size // ranks
        return tuple(local)

    def pieces(self, mesh: Mesh) -> tuple[Piece, ...]:
        """Rectangles of the logical tensor that this rank holds; vocabulary padding is left out."""
        local_shape = self.local_shape(mesh)
        if self.shared is not None and self.sharers(mesh) > 1:
            return tuple(each for each in self._pieces_of_group(self.shared, local_shape, mesh) if 0 not in each.sizes)
        starts, sizes = [0] * len(self.shape), list(self.shape)
        for dim, axis in self.split.items():
            width = local_shape[dim] // self.blocks
            starts[dim] = width * mesh.rank(axis)
            sizes[dim] = max(0, min(width, self.shape[dim] - starts[dim])) if self.blocks == 1 else width
        if 0 in sizes:
            return ()
        found = []
        for block in range(self.blocks):
            logical, local = list(starts), [0] * len(starts)
            for dim in self.split:
                logical[dim] += block * (self.shape[dim] // self.blocks)
                local[dim] += block * sizes[dim]
            found.append(Piece(tuple(logical), tuple(local), tuple(sizes)))
        return tuple(found)

    def counted_pieces(self, mesh: Mesh) -> tuple[Piece, ...]:
        """The pieces that this rank counts in a sum over all model-parallel ranks: replicas count once."""
        if not self.gradient_owner(mesh):
            return ()
        pieces, sharers = self.pieces(mesh), self.sharers(mesh)
        return pieces if sharers == 1 or mesh.rank(self.split[0]) % sharers == 0 else pieces[:-1]

    def local_elements(self, mesh: Mesh) -> int:
        """Elements of the logical tensor that this rank holds."""
        return sum(math.prod(piece.sizes) for piece in self.pieces(mesh))

    def counted_elements(self, mesh: Mesh) -> int:
        """Elements of the logical tensor that this rank counts; over a model's ranks they add up to all."""
        return sum(math.prod(piece.sizes) for piece in self.counted_pieces(mesh))

    def sharers(self, mesh: Mesh) -> int:
        """Neighbouring ranks of the split axis that hold the same shared rows; 1 where nothing is shared."""
        return 1 if self.shared is None else max(1, mesh.size(self.split[0]) // self.shared.groups)

    def shared_range(self, mesh: Mesh) -> tuple[int, int] | None:
        """Flat range of the local tensor that is shared with other ranks; None where nothing is."""
        if self.shared is None or self.sharers(mesh) == 1:
            return None
        elements = math.prod(self.local_shape(mesh))
        return elements - self.shared.rows * math.prod(self.shape[1:]), elements

    def _pieces_of_group(self, shared: SharedRows, local_shape: tuple[int, ...], mesh: Mesh) -> tuple[Piece, Piece]:
        """This rank's part of a group's divided rows, and the group's shared rows."""
        group, part = divmod(mesh.rank(self.split[0]), self.sharers(mesh))
        rest = (0,) * (len(self.shape) - 1)
        rows = local_shape[0] - shared.rows
        height = self.shape[0] // shared.groups
        start, stop = group * height, (group + 1) * height
        return (
            Piece((start + part * rows, *rest), (0, *rest), (rows, *self.shape[1:])),
            Piece((stop - shared.rows, *rest), (rows, *rest), (shared.rows, *self.shape[1:])),
        )

    def gradient_owner(self, mesh: Mesh) -> bool:
        """Whether this rank counts the parameter in a sum over all model-parallel ranks (replicas count once)."""
        axes = ("etp", "ep") if {"etp", "ep"} & set(self.split.values()) else ("tp",)
        return all(mesh.rank(axis) == 0 for axis in axes if axis not in self.split.values())  # type: ignore[arg-type]


def sharded_parameter(sharding: Sharding, mesh: Mesh, *, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """An uninitialized parameter that carries its layout; see ``tensor_parallel.initialize`` for its values."""
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
