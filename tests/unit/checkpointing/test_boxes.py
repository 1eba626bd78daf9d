"""Boxes say exactly which logical elements a rank holds and where: a wrong one is a silently scrambled weight."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron.core.checkpointing.boxes import Box, boxes, rectangles
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.sharding import Sharding, StackedPart

SHAPES = [(), (1,), (5,), (1, 1), (3, 4), (4, 1), (1, 4), (2, 3, 2), (3, 1, 2), (2, 2, 2, 2), (2, 1, 3, 2)]


def shard(logical: NDArray[np.int64], sharding: Sharding, mesh: Mesh) -> NDArray[np.int64]:
    """The local tensor of a rank, padding holding -1: an independent account of what ``Sharding`` means."""
    local = logical
    for dim, axis in sharding.split.items():
        missing = sharding.padded_size(dim, mesh) - local.shape[dim]
        local = np.pad(local, [(0, missing if d == dim else 0) for d in range(local.ndim)], constant_values=-1)
        ends = np.cumsum([part.rows for part in sharding.parts])[:-1]
        parts = np.split(local, ends, axis=dim) if sharding.parts else [local]
        mine = [np.split(part, mesh.size(axis), axis=dim)[mesh.rank(axis)] for part in parts]
        local = np.concatenate(mine, axis=dim)
    return local


def read(flat: NDArray[np.int64], box: Box) -> NDArray[np.int64]:
    return np.lib.stride_tricks.as_strided(
        flat[box.start :], box.sizes, [stride * flat.itemsize for stride in box.strides], writeable=False
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_flat_range_is_rebuilt_from_at_most_2n_minus_1_rectangles(shape: tuple[int, ...]) -> None:
    """All ranges of all small shapes: in order, complete, without overlap, and never more than the bound."""
    total = math.prod(shape)
    index = np.arange(total).reshape(shape)
    for start, stop in itertools.combinations_with_replacement(range(total + 1), 2):
        parts = rectangles(shape, start, stop)
        covered = [index[tuple(slice(o, o + s) for o, s in zip(p.offsets, p.sizes))].ravel() for p in parts]
        assert np.concatenate([*covered, []]).tolist() == list(range(start, stop))
        assert len(parts) <= max(1, 2 * len(shape) - 1)


def test_the_bound_is_reached() -> None:
    """A range from inside the first element's neighbour to inside the last needs all 2n - 1."""
    assert len(rectangles((3, 3, 3), 1, 26)) == 5


CASES = [
    Sharding(()),
    Sharding((6,)),
    Sharding((6,), split={0: "tp"}),
    Sharding((6, 4), split={0: "tp"}),
    Sharding((4, 6), split={1: "tp"}),
    Sharding((12, 2), split={0: "tp"}, parts=(StackedPart(6), StackedPart(6))),
    Sharding((2, 12), split={1: "tp"}, parts=(StackedPart(6), StackedPart(6))),
    Sharding((18, 1, 2), split={0: "tp"}, parts=(StackedPart(6), StackedPart(12))),
    Sharding((7, 2), split={0: "tp"}, pad_multiple=2),
    Sharding((2, 7), split={1: "tp"}, pad_multiple=2),
    Sharding((1, 2), split={0: "tp"}, pad_multiple=4),
    Sharding((4, 6, 2), split={0: "ep", 1: "etp"}),
]


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("sharding", CASES, ids=lambda s: f"{s.shape}-{s.split}-{len(s.parts)}-{s.pad_multiple}")
def test_boxes_of_every_range_hold_the_logical_elements_they_name(sharding: Sharding, tp: int) -> None:
    """Splits, stacked blocks and padding, each cut into every flat range: what is written is what the name promises."""
    experts = "ep" in sharding.split.values()
    logical = np.arange(math.prod(sharding.shape)).reshape(sharding.shape)
    for rank in range(2 * tp if experts else tp):
        mesh = Mesh.of(tp=tp, ep=2, dp=2, rank=rank) if experts else Mesh.of(tp=tp, rank=rank)
        local = shard(logical, sharding, mesh)
        assert local.shape == sharding.local_shape(mesh)
        for start, stop in itertools.combinations_with_replacement(range(local.size + 1), 2):
            flat = local.ravel()[start:stop]
            found = boxes(sharding, mesh, flat_range=(start, stop))
            for box in found:
                there = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes))
                assert read(flat, box).tolist() == logical[there].tolist()
            held = sorted(int(value) for box in found for value in read(flat, box).ravel())
            assert held == sorted(value for value in flat.tolist() if value >= 0)


@pytest.mark.parametrize("sharding", CASES, ids=lambda s: f"{s.shape}-{s.split}-{len(s.parts)}-{s.pad_multiple}")
def test_whole_shards_of_all_ranks_cover_the_logical_tensor_once(sharding: Sharding) -> None:
    """No element of a weight is lost between ranks, none is written by two shards."""
    meshes = [Mesh.of(tp=2, dp=2, ep=2, rank=rank) for rank in range(4)]
    count = np.zeros(sharding.shape, dtype=int)
    for box in {box for mesh in meshes for box in boxes(sharding, mesh)}:
        count[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes))] += 1
    assert (count == 1).all()


def test_a_rank_that_holds_only_padding_has_no_boxes() -> None:
    """A vocabulary of 1 over 2 ranks: the second has rows, but none that belong in a file."""
    sharding = Sharding((1, 2), split={0: "tp"}, pad_multiple=4)
    assert boxes(sharding, Mesh.of(tp=2, rank=1)) == []
    assert boxes(sharding, Mesh.of(tp=2, rank=0)) == [Box((0, 0), (1, 2), 0, (2, 1))]
