"""Ranks over named axes: every small grid, and Megatron's published rank order."""

from __future__ import annotations

import itertools

import pytest

from megatron.core.parallel.grid import Axis, RankGrid
from tests.harness.sentences import expect_error

AXES: tuple[Axis, ...] = ("pp", "dp", "cp", "tp")
SMALL_GRIDS = [RankGrid(dict(zip(AXES, sizes))) for sizes in itertools.product((1, 2, 3), (1, 2, 3), (1, 2), (1, 2))]
UNIONS = [union for count in range(5) for union in itertools.combinations(AXES, count)]


def groups(grid: RankGrid, *axes: Axis) -> list[tuple[int, ...]]:
    """Every group over ``axes``."""
    return sorted({grid.members(rank, *axes) for rank in range(grid.size)})


def test_every_rank_has_a_place_of_its_own() -> None:
    """Two ranks at one place would train the same shard twice and another not at all."""
    for grid in SMALL_GRIDS:
        places = [tuple(grid.coordinates(rank).items()) for rank in range(grid.size)]
        assert len(set(places)) == grid.size
        assert [grid.rank_at(dict(place)) for place in places] == list(range(grid.size))


def test_groups_partition_the_ranks() -> None:
    """A rank in two groups of one kind, or in none, makes a collective hang."""
    for grid in SMALL_GRIDS:
        for union in UNIONS:
            found = groups(grid, *union)
            assert sorted(rank for group in found for rank in group) == list(range(grid.size))
            expected = 1
            for axis in union:
                expected *= grid.axes[axis]
            assert {len(group) for group in found} == {expected}


def test_members_differ_on_their_axes_only_and_ascend() -> None:
    """Every member computes the same list in the same order, or gathered parts arrive shuffled."""
    for grid in SMALL_GRIDS:
        for union in UNIONS:
            for rank in range(grid.size):
                members = grid.members(rank, *union)
                assert rank in members
                assert list(members) == sorted(members)
                assert all(grid.members(member, *union) == members for member in members)
                here = grid.coordinates(rank)
                for member in members:
                    there = grid.coordinates(member)
                    assert all(here[axis] == there[axis] for axis in AXES if axis not in union)


def test_rank_order_is_megatrons_default() -> None:
    """The documented example of 16 ranks, tensor 2, pipeline 4: launch scripts count on who shares a node."""
    grid = RankGrid({"pp": 4, "dp": 2, "cp": 1, "tp": 2})
    assert groups(grid, "tp") == [(rank, rank + 1) for rank in range(0, 16, 2)]
    assert groups(grid, "dp") == [(0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15)]
    assert groups(grid, "pp") == [(0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)]
    assert groups(grid, "pp", "tp") == [(0, 1, 4, 5, 8, 9, 12, 13), (2, 3, 6, 7, 10, 11, 14, 15)]


def test_rank_order_with_pipeline_inside_data() -> None:
    """``--use-tp-pp-dp-mapping``: pipeline neighbours sit closer together than data-parallel ones."""
    grid = RankGrid({"dp": 2, "pp": 4, "cp": 1, "tp": 2})
    assert groups(grid, "tp") == [(rank, rank + 1) for rank in range(0, 16, 2)]
    assert groups(grid, "pp") == [(0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15)]
    assert groups(grid, "dp") == [(rank, rank + 8) for rank in range(8)]


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_grid_is_refused(rank: int) -> None:
    """A wrong RANK variable must not wrap around to somebody else's place."""
    with expect_error(ValueError, rank, "4 ranks"):
        RankGrid({"dp": 2, "tp": 2}).coordinates(rank)


def test_an_empty_axis_is_refused() -> None:
    """A division that came out as 0 ranks is caught where it happens."""
    with expect_error(ValueError, "0"):
        RankGrid({"dp": 0, "tp": 2})
