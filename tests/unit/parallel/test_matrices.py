"""Logical matrices of parameters, and the blocks of them that ranks hold: each element once, from its own place."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from megatron.core.parallel.matrices import LogicalMatrix, blocks, logical_matrices
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.sharding import Sharding, SharedRows, StackedPart

QKV = SharedRows(groups=2, rows=4, matrices=((0, 2), (0, 2), (1, 2), (2, 2)))
GATED = SharedRows(groups=2, rows=4, matrices=((0, 2), (1, 2), (0, 2), (1, 2), (2, 2), (3, 2)))
SHARDINGS: dict[str, Sharding] = {
    "columns": Sharding((8, 6), {0: "tp"}),
    "rows": Sharding((6, 8), {1: "tp"}),
    "replicated": Sharding((6, 8)),
    "gate and up": Sharding((16, 3), {0: "tp"}, parts=(StackedPart(8), StackedPart(8))),
    "shared group": Sharding((12, 3), {0: "tp"}, parts=(StackedPart(8), StackedPart(4, groups=1))),
    "queries, keys, values": Sharding((16, 5), {0: "tp"}, shared=QKV),
    "with a gate": Sharding((24, 5), {0: "tp"}, shared=GATED),
    "experts, gate and up": Sharding((4, 2, 4, 3), {0: "ep", 2: "etp"}, reduce=("edp",)),
    "experts, down": Sharding((4, 3, 4), {0: "ep", 2: "etp"}, reduce=("edp",)),
}
WORLDS: tuple[dict[str, Any], ...] = (
    {},
    {"tp": 2},
    {"tp": 4},
    {"tp": 2, "ep": 2, "etp": 1},
    {"tp": 2, "dp": 2, "ep": 2},
)


def logical(sharding: Sharding, matrix: LogicalMatrix) -> torch.Tensor:
    """The matrix, of a parameter whose elements are numbered."""
    numbered = torch.arange(math.prod(sharding.shape)).view(-1, sharding.shape[-1])
    return torch.cat([numbered[first : first + count] for first, count in matrix.runs])


def local(sharding: Sharding, mesh: Mesh) -> torch.Tensor:
    """What a rank holds of such a parameter, flat."""
    numbered = torch.arange(math.prod(sharding.shape)).view(sharding.shape)
    held = torch.full(sharding.local_shape(mesh), -1)
    for piece in sharding.pieces(mesh):
        held[piece.slices(of_local=True)] = numbered[piece.slices(of_local=False)]
    return held.view(-1)


@pytest.mark.parametrize("name", SHARDINGS)
def test_blocks_make_up_every_matrix(name: str) -> None:
    """A block in a wrong place mixes rows of queries with those of keys, and nothing but the loss would show it."""
    sharding = SHARDINGS[name]
    matrices = logical_matrices(sharding)
    for world, parts in itertools.product(WORLDS, (1, 3)):
        counted = [torch.zeros(matrix.shape) for matrix in matrices]
        ranks = [Mesh.of(**world, rank=rank) for rank in range(Mesh.of(**world).world_size)]
        for mesh in ranks:
            held, found = local(sharding, mesh), 0
            cuts = [len(held) * part // parts for part in range(parts + 1)]
            for start, stop in itertools.pairwise(cuts):
                for block in blocks(sharding, matrices, mesh, start=start, stop=stop):
                    assert start <= block.start and block.start + block.size <= stop
                    rows = slice(block.row, block.row + block.rows)
                    columns = slice(block.column, block.column + block.columns)
                    here = held[block.start : block.start + block.size].view(block.rows, block.columns)
                    assert torch.equal(here, logical(sharding, matrices[block.matrix])[rows, columns])
                    found += block.size
                if mesh.rank(*sharding.reduce) == 0:
                    for block in blocks(sharding, matrices, mesh, start=start, stop=stop, counted=True):
                        rows = slice(block.row, block.row + block.rows)
                        counted[block.matrix][rows, block.column : block.column + block.columns] += 1
            assert found == len(held)
        assert all(torch.equal(each, torch.ones_like(each)) for each in counted)


@pytest.mark.parametrize(
    ("name", "shapes", "fused"),
    [
        ("gate and up", [(8, 3), (8, 3)], [(16, 3)]),
        ("queries, keys, values", [(8, 5), (4, 5), (4, 5)], [(16, 5)]),
        ("with a gate", [(8, 5), (8, 5), (4, 5), (4, 5)], [(24, 5)]),
        ("experts, gate and up", [(4, 3)] * 8, [(8, 3)] * 4),
        ("experts, down", [(3, 4)] * 4, [(3, 4)] * 4),
        ("rows", [(6, 8)], [(6, 8)]),
    ],
)
def test_what_is_a_matrix_of_its_own(name: str, shapes: list[tuple[int, int]], fused: list[tuple[int, int]]) -> None:
    """Stacked matrices are orthogonalized apart; fused by flags, they are one, but experts never are."""
    sharding = SHARDINGS[name]
    assert [matrix.shape for matrix in logical_matrices(sharding)] == shapes
    one = logical_matrices(sharding, splits_qkv=False, splits_parts=False)
    assert [matrix.shape for matrix in one] == fused


def test_rows_of_queries_are_in_the_order_of_heads() -> None:
    queries, keys, values = logical_matrices(SHARDINGS["queries, keys, values"])
    assert [first for first, _ in queries.runs] == [0, 2, 8, 10]
    assert (keys.runs, values.runs) == (((4, 2), (12, 2)), ((6, 2), (14, 2)))
