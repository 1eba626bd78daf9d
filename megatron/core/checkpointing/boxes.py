"""Flat ranges as rectangles: which boxes of a logical tensor a rank's local numbers are, and where those numbers lie.

A flat range of an n-dimensional tensor is at most 2n - 1 rectangles: a ragged head, a slab of whole rows and a ragged
tail, the ragged ends being ranges of one dimension less. So the slice of a shard that a rank's optimizer owns can be
written and read as ordinary pieces of the logical tensor, by any layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.sharding import Piece, Sharding

Dims = tuple[int, ...]


@dataclass(frozen=True)
class Rectangle:
    """A contiguous block of an n-dimensional index space."""

    offsets: Dims
    sizes: Dims


@dataclass(frozen=True)
class Box:
    """A rectangle of the logical tensor and the place of its elements in the flat local tensor.

    Element ``(i, j, …)`` of the rectangle is element ``start + i·strides[0] + j·strides[1] + …`` of the local tensor.
    """

    offsets: Dims
    sizes: Dims
    start: int
    strides: Dims


def rectangles(shape: Dims, start: int, stop: int) -> list[Rectangle]:
    """Elements ``[start, stop)`` of the row-major flattening of ``shape``, as rectangles in that order."""
    assert 0 <= start <= stop <= math.prod(shape), f"[{start}, {stop}) is not a range of a tensor of shape {shape}"
    if start == stop:
        return []
    if not shape:
        return [Rectangle((), ())]
    if len(shape) == 1:
        return [Rectangle((start,), (stop - start,))]
    row = math.prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:
        return _within_row(first, shape[1:], head, tail)
    found: list[Rectangle] = []
    if head:
        found += _within_row(first, shape[1:], head, row)
        first += 1
    if first < last:
        found.append(Rectangle((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    return found + _within_row(last, shape[1:], 0, tail)


def _within_row(index: int, row_shape: Dims, start: int, stop: int) -> list[Rectangle]:
    inner = rectangles(row_shape, start, stop)
    return [Rectangle((index, *part.offsets), (1, *part.sizes)) for part in inner]


def boxes(sharding: Sharding, mesh: Mesh, *, flat_range: tuple[int, int] | None = None) -> list[Box]:
    """Boxes of the logical tensor held by this rank, or by the ``flat_range`` of its flattened local shard.

    Stacked parts give a box each; vocabulary padding gives none. Boxes of one tensor never overlap.
    """
    local_shape = sharding.local_shape(mesh)
    start, stop = flat_range or (0, math.prod(local_shape))
    strides = tuple(math.prod(local_shape[dim + 1 :]) for dim in range(len(local_shape)))
    found: list[Box] = []
    for rectangle in rectangles(local_shape, start, stop):
        for piece in sharding.pieces(mesh):
            shared = _intersect(rectangle, piece)
            if shared is not None:
                moved = zip(shared.offsets, piece.local, piece.logical)
                offsets = tuple(at - here + there for at, here, there in moved)
                first = sum(at * stride for at, stride in zip(shared.offsets, strides))
                found.append(Box(offsets, shared.sizes, first - start, strides))
    return found


def _intersect(rectangle: Rectangle, piece: Piece) -> Rectangle | None:
    """Part of ``piece`` inside ``rectangle``, both in local coordinates."""
    offsets, sizes = [], []
    for at, size, piece_at, piece_size in zip(rectangle.offsets, rectangle.sizes, piece.local, piece.sizes):
        low, high = max(at, piece_at), min(at + size, piece_at + piece_size)
        if low >= high:
            return None
        offsets.append(low)
        sizes.append(high - low)
    return Rectangle(tuple(offsets), tuple(sizes))
