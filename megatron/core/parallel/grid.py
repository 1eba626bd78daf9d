"""Ranks laid out over named axes: pure arithmetic, no processes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Axis = Literal["dc", "pp", "dp", "cp", "tp", "edp", "ep", "etp", "dp_out", "dp_in", "edp_out", "edp_in"]

LEVELS: Mapping[Axis, tuple[Axis, Axis]] = {"dp": ("dp_out", "dp_in"), "edp": ("edp_out", "edp_in")}
"""Axes of replicas, and the two that each of them is divided into: copies, and the ranks of one copy."""


@dataclass(frozen=True)
class RankGrid:
    """Ranks ``0 .. size-1`` numbered over ``axes``, the slowest-varying axis first."""

    axes: Mapping[Axis, int]

    def __post_init__(self) -> None:
        for axis, size in self.axes.items():
            if size < 1:
                raise ValueError(f"axis {axis} has size {size}; an axis holds at least one rank")

    @property
    def size(self) -> int:
        """Number of ranks in the grid."""
        return math.prod(self.axes.values())

    def in_levels(self, copies: int) -> RankGrid:
        """A grid of the same ranks, with each axis of ``LEVELS`` as two: ``copies`` parts, and the ranks of a part."""
        axes: dict[Axis, int] = {}
        for axis, size in self.axes.items():
            if axis in LEVELS:
                (outer, inner), (ranks, rest) = LEVELS[axis], divmod(size, copies)
                if rest:
                    raise ValueError(f"axis {axis} has {size} ranks, which cannot be divided into {copies} copies")
                axes |= {outer: copies, inner: ranks}
            else:
                axes[axis] = size
        return RankGrid(axes)

    def coordinates(self, rank: int) -> dict[Axis, int]:
        """Position of ``rank`` on every axis."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is outside a grid of {self.size} ranks")
        found: dict[Axis, int] = {}
        for axis, size in reversed(tuple(self.axes.items())):
            rank, found[axis] = divmod(rank, size)
        return {axis: found[axis] for axis in self.axes}

    def rank_at(self, coordinates: Mapping[Axis, int]) -> int:
        """Rank at a position given on every axis."""
        rank = 0
        for axis, size in self.axes.items():
            rank = rank * size + coordinates[axis]
        return rank

    def members(self, rank: int, *axes: Axis) -> tuple[int, ...]:
        """Ranks that differ from ``rank`` only on ``axes``, ascending along those axes in grid order."""
        assert self.axes.keys() >= set(axes), f"{axes} are not all axes of the grid {tuple(self.axes)}"
        here = self.coordinates(rank)
        spread = [range(size) if axis in axes else (here[axis],) for axis, size in self.axes.items()]
        return tuple(self.rank_at(dict(zip(self.axes, position))) for position in itertools.product(*spread))
