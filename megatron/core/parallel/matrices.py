"""The logical matrices that a parameter stacks, and which rectangles of them a range of a rank's numbers is."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.sharding import Piece, Sharding


@dataclass(frozen=True)
class LogicalMatrix:
    """One matrix among those of a parameter: ``runs`` (first, number) of the rows of the parameter, which is seen as
    ``[all rows, columns]``, one after the other.
    """

    runs: tuple[tuple[int, int], ...]
    columns: int

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(count for _, count in self.runs)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.rows, self.columns


@dataclass(frozen=True)
class Block:
    """A rectangle of logical matrix number ``matrix`` that is the range of a local tensor from ``start`` on."""

    matrix: int
    row: int
    column: int
    rows: int
    columns: int
    start: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.rows * self.columns


def logical_matrices(
    sharding: Sharding, *, splits_qkv: bool = True, splits_parts: bool = True
) -> tuple[LogicalMatrix, ...]:
    """The matrices of a parameter with at least two dimensions: each expert's, each stacked part's (gate and up), and
    queries, keys and values. ``splits_qkv``, ``splits_parts``: off, those are one matrix.
    """
    *stacked, rows, columns = sharding.shape
    is_split_by_expert = sharding.split.get(0) == "ep"
    if stacked:
        height = rows if splits_parts or not is_split_by_expert else rows * math.prod(stacked[1:])
        firsts = range(0, math.prod(stacked) * rows, height)
        return tuple(LogicalMatrix(((first, height),), columns) for first in firsts)
    if sharding.parts and 0 in sharding.split and splits_parts:
        heights = [part.rows for part in sharding.parts]
        firsts_of_parts = itertools.accumulate(heights, initial=0)
        return tuple(LogicalMatrix((run,), columns) for run in zip(firsts_of_parts, heights))
    if sharding.shared is not None and sharding.shared.matrices and splits_qkv:
        runs = dict[int, list[tuple[int, int]]]()
        first = 0
        for matrix, height in sharding.shared.matrices * sharding.shared.groups:
            runs.setdefault(matrix, []).append((first, height))
            first += height
        return tuple(LogicalMatrix(tuple(each), columns) for _, each in sorted(runs.items()))
    return (LogicalMatrix(((0, rows),), columns),)


def blocks(
    sharding: Sharding,
    matrices: Sequence[LogicalMatrix],
    mesh: Mesh,
    *,
    start: int,
    stop: int,
    counted: bool = False,
) -> Iterator[Block]:
    """The blocks of ``matrices`` that elements ``[start, stop)`` of the flat local tensor of ``mesh``'s rank are, in
    their order. ``counted``: without what other ranks count, so that each logical element is found on one rank.
    """
    runs = sorted(
        (first, count, number, before)
        for number, matrix in enumerate(matrices)
        for first, count, before in _placed(matrix)
    )
    firsts = [first for first, *_ in runs]
    for row, local_row, count, column, width in _rows(sharding, mesh, counted=counted):
        for first, height, matrix, before in runs[bisect.bisect_right(firsts, row) - 1 :]:
            begin, end = max(first, row), min(first + height, row + count)
            if begin >= end:
                break
            place = (local_row + begin - row) * width
            for at, rows, offset, columns in _clipped(place, end - begin, width, start, stop):
                yield Block(matrix, before + begin - first + (at - place) // width, column + offset, rows, columns, at)


def _placed(matrix: LogicalMatrix) -> Iterator[tuple[int, int, int]]:
    """Each run with the rows of its matrix before it."""
    before = 0
    for first, count in matrix.runs:
        yield first, count, before
        before += count


def _rows(sharding: Sharding, mesh: Mesh, *, counted: bool) -> Iterator[tuple[int, int, int, int, int]]:
    """Runs of whole rows of the local tensor: first logical and local row, their number, first column and columns."""
    local_shape = sharding.local_shape(mesh)
    pieces: Sequence[Piece] = sharding.counted_pieces(mesh) if counted else sharding.pieces(mesh)
    for piece in pieces:
        *outer, rows, columns = piece.sizes
        assert columns == local_shape[-1], f"{sharding} has padded columns"
        for index in itertools.product(*map(range, outer)):
            places = [
                sum(
                    (offset + at) * math.prod(shape[dim + 1 : -1])
                    for dim, (offset, at) in enumerate(zip(offsets, (*index, 0)))
                )
                for offsets, shape in ((piece.logical, sharding.shape), (piece.local, local_shape))
            ]
            yield places[0], places[1], rows, piece.logical[-1], columns


def _clipped(place: int, rows: int, width: int, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """What ``[start, stop)`` holds of ``rows`` rows from ``place`` on: a ragged head, whole rows and a ragged tail.

    Each has its first element, rows, first column and columns.
    """
    begin, end = max(place, start), min(place + rows * width, stop)
    while begin < end:
        offset = (begin - place) % width
        whole = 0 if offset else (end - begin) // width
        size = whole * width or min(width - offset, end - begin)
        yield begin, max(whole, 1), offset, size // max(whole, 1)
        begin += size
