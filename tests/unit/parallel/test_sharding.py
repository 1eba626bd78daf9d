"""Local pieces tile the logical tensor: every element held once per replica, at every layout, padding never counted."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.parallel.grid import Axis
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.sharding import (
    Sharding,
    SharedRows,
    StackedPart,
    sharded_parameter,
    sharded_parameters,
    sharding_of,
)
from megatron.errors import ConfigError
from tests.harness.sentences import expect_error

GPT2_VOCABULARY = 50257


def tensor_parallel_meshes(tp: int) -> list[Mesh]:
    return [Mesh.of(tp=tp, rank=rank) for rank in range(tp)]


def split_logical(logical: Tensor, sharding: Sharding, meshes: list[Mesh]) -> list[Tensor]:
    """Each rank's local tensor, cut out of the logical one; -1 marks what no piece fills."""
    locals_ = []
    for mesh in meshes:
        local = torch.full(sharding.local_shape(mesh), -1, dtype=logical.dtype)
        for piece in sharding.pieces(mesh):
            local[piece.slices(of_local=True)] = logical[piece.slices(of_local=False)]
        locals_.append(local)
    return locals_


def join_locals(locals_: list[Tensor], sharding: Sharding, meshes: list[Mesh]) -> tuple[Tensor, Tensor]:
    """The logical tensor put together again, and how often each of its elements was written."""
    logical = torch.full(sharding.shape, -1, dtype=locals_[0].dtype)
    count = torch.zeros(sharding.shape, dtype=torch.int64)
    for local, mesh in zip(locals_, meshes):
        for piece in sharding.pieces(mesh):
            logical[piece.slices(of_local=False)] = local[piece.slices(of_local=True)]
            count[piece.slices(of_local=False)] += 1
    return logical, count


def assert_tiles(sharding: Sharding, meshes: list[Mesh], *, copies: int = 1) -> None:
    logical = torch.arange(torch.Size(sharding.shape).numel()).view(sharding.shape)
    rebuilt, count = join_locals(split_logical(logical, sharding, meshes), sharding, meshes)
    assert torch.equal(rebuilt, logical)
    assert torch.equal(count, torch.full_like(count, copies))


@pytest.mark.parametrize("tp", range(1, 9))
def test_splits_tile_the_logical_tensor(tp: int) -> None:
    """Columns, rows, middle dimensions and stacked blocks, at every tensor-parallel size."""
    meshes = tensor_parallel_meshes(tp)
    for shape, dim in [((2 * tp,), 0), ((3 * tp, 5), 0), ((5, 2 * tp), 1), ((2, 2 * tp, 3), 1)]:
        assert_tiles(Sharding(shape, {dim: "tp"}), meshes)
    for sizes, dim in itertools.product(((2,), (2, 2), (1, 3, 2)), (0, 1)):
        parts = tuple(StackedPart(size * tp) for size in sizes)
        shape = (sum(sizes) * tp, 4) if dim == 0 else (4, sum(sizes) * tp)
        assert_tiles(Sharding(shape, {dim: "tp"}, parts=parts), meshes)
    assert_tiles(Sharding((3, 4)), meshes, copies=tp)


@pytest.mark.parametrize("tp", range(1, 9))
@pytest.mark.parametrize("size", [1, 5, 16, 17, GPT2_VOCABULARY])
def test_padding_is_never_part_of_the_logical_tensor(size: int, tp: int) -> None:
    """A checkpoint with padding in it can't be loaded at another tensor-parallel size."""
    for pad_multiple in (2, 4, 128):
        assert_tiles(Sharding((size,), {0: "tp"}, pad_multiple=pad_multiple), tensor_parallel_meshes(tp))


@pytest.mark.parametrize(
    ("tp", "padded"),
    [(1, 50304), (2, 50432), (3, 50304), (4, 50688), (5, 50560), (6, 50688), (7, 50176 + 896), (8, 51200)],
)
def test_padded_vocabulary_is_megatrons(tp: int, padded: int) -> None:
    """The next multiple of 128·tp: a log line, a memory estimate and a converted checkpoint state it."""
    sharding = Sharding((GPT2_VOCABULARY, 8), {0: "tp"}, pad_multiple=128)
    for mesh in tensor_parallel_meshes(tp):
        assert sharding.padded_size(0, mesh) == padded
        assert sharding.local_shape(mesh) == (padded // tp, 8)


def test_a_rank_of_padding_alone_holds_no_piece() -> None:
    """A tiny vocabulary at a large tensor-parallel size is legal: the last ranks hold nothing that counts."""
    sharding = Sharding((5, 3), {0: "tp"}, pad_multiple=4)
    sizes = [[piece.sizes for piece in sharding.pieces(mesh)] for mesh in tensor_parallel_meshes(4)]
    assert sizes == [[(4, 3)], [(1, 3)], [], []]


def test_parts_are_split_one_by_one() -> None:
    """Gate and up of a gated MLP: each rank holds its part of both, or SwiGLU multiplies gate with gate."""
    sharding = Sharding((8, 2), {0: "tp"}, parts=(StackedPart(4), StackedPart(4)))
    pieces = sharding.pieces(Mesh.of(tp=2, rank=1))
    assert [(piece.logical, piece.local, piece.sizes) for piece in pieces] == [
        ((2, 0), (0, 0), (2, 2)),
        ((6, 0), (2, 0), (2, 2)),
    ]


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_shared_rows_are_held_by_all_that_need_them(groups: int, tp: int) -> None:
    """A key/value head that serves query heads of several ranks: its rows on each of them, counted once."""
    queries, rows, meshes = 8 // groups, 3, tensor_parallel_meshes(tp)
    for shape in ((groups * (queries + rows), 2), (groups * (queries + rows),)):
        sharding = Sharding(shape, {0: "tp"}, shared=SharedRows(groups, rows))
        logical = torch.arange(torch.Size(shape).numel()).view(shape)
        locals_ = split_logical(logical, sharding, meshes)
        assert all((local >= 0).all() for local in locals_)
        rebuilt, count = join_locals(locals_, sharding, meshes)
        assert torch.equal(rebuilt, logical)
        sharers = max(1, tp // groups)
        held = count.view(groups, queries + rows, -1)
        assert (held[:, :queries] == 1).all() and (held[:, queries:] == sharers).all()
        for mesh, local in zip(meshes, locals_):
            found = sharding.shared_ranges(mesh)
            assert len(found) == (sharers > 1)
            for shared in found:
                first = locals_[mesh.rank("tp") // sharers * sharers]
                own, other = (each.flatten()[shared.start : shared.stop] for each in (local, first))
                assert torch.equal(own, other) and len(own) == rows * logical[0].numel()
        counted = [piece for mesh in meshes for piece in sharding.counted_pieces(mesh)]
        assert sum(sharding.counted_elements(mesh) for mesh in meshes) == logical.numel()
        assert len({piece.logical for piece in counted}) == len(counted)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("groups", [(1, 1), (2, 2), (4, 4), (1, 4), (8, 2)])
def test_unequal_parts_are_split_or_shared(groups: tuple[int, int], tp: int) -> None:
    """The input matrix of a state-space layer, z|x|B|C|dt: with fewer groups of B and C than ranks those that share a
    group hold all of its rows, which count once in the norm and whose gradient is summed over them.
    """
    parts = (StackedPart(16), StackedPart(8), *(StackedPart(3 * each, groups=each) for each in groups), StackedPart(8))
    meshes, rows = tensor_parallel_meshes(tp), sum(part.rows for part in parts)
    for shape in ((rows, 2), (rows, 1, 3), (rows,)):
        sharding = Sharding(shape, {0: "tp"}, parts=parts)
        logical = torch.arange(torch.Size(shape).numel()).view(shape)
        locals_ = split_logical(logical, sharding, meshes)
        for rank, local in enumerate(locals_):
            cut = [
                whole.chunk(min(tp, part.groups or tp))[rank // max(1, tp // (part.groups or tp))]
                for whole, part in zip(torch.split(logical, [part.rows for part in parts]), parts)
            ]
            assert torch.equal(local, torch.cat(cut))
        rebuilt, count = join_locals(locals_, sharding, meshes)
        assert torch.equal(rebuilt, logical)
        sharers = [part.sharers(tp) for part in parts]
        assert [sorted({*each.flatten().tolist()}) for each in torch.split(count, [part.rows for part in parts])] == [
            [n] for n in sharers
        ]
        assert sum(sharding.counted_elements(mesh) for mesh in meshes) == logical.numel()
        for mesh, local in zip(meshes, locals_):
            marked = torch.ones(local.numel(), dtype=torch.int64)
            for shared in sharding.shared_ranges(mesh):
                marked[shared.start : shared.stop] = shared.sharers
            held = torch.cat([torch.full((part.local_rows(tp),), part.sharers(tp)) for part in parts])
            assert torch.equal(marked, held.repeat_interleave(local[0].numel()))


def test_neighbouring_shared_parts_are_summed_in_one_message() -> None:
    """B and C of a state-space layer lie side by side: one all-reduce, not two."""
    parts = (StackedPart(8), StackedPart(3, groups=1), StackedPart(3, groups=1), StackedPart(4))
    found = Sharding((18, 5), {0: "tp"}, parts=parts).shared_ranges(Mesh.of(tp=4, rank=1))
    assert [(each.start, each.stop, each.sharers) for each in found] == [(10, 40, 4)]


def test_shared_rows_that_do_not_fit_are_refused() -> None:
    """Three groups on two ranks, or query rows that the ranks of a group cannot divide."""
    for sharding in (
        Sharding((15, 2), {0: "tp"}, shared=SharedRows(3, 2)),
        Sharding((10, 2), {0: "tp"}, shared=SharedRows(2, 2)),
    ):
        with pytest.raises(ValueError, match=r"do not fit 4 ranks|is not divisible by tp=4"):
            sharding.local_shape(Mesh.of(tp=4))
    with expect_error(ValueError, "0"):
        Sharding((4, 4), {1: "tp"}, shared=SharedRows(2, 1))


@pytest.mark.parametrize(("ep", "etp"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)])
def test_expert_weights_split_over_two_axes(ep: int, etp: int) -> None:
    """Dimension 0 counts experts, dimension 1 their width; each expert-data replica holds all of it once."""
    meshes = [Mesh.of(tp=2, dp=4, ep=ep, etp=etp, rank=rank) for rank in range(8)]
    assert_tiles(Sharding((4, 6, 3), {0: "ep", 1: "etp"}), meshes, copies=8 // (ep * etp))


@pytest.mark.parametrize(
    "sharding",
    [
        Sharding((4,)),
        Sharding((4, 6), {0: "tp"}),
        Sharding((4, 6), {1: "tp"}),
        Sharding((7, 3), {0: "tp"}, pad_multiple=2),
        Sharding((8, 3), {0: "tp"}, parts=(StackedPart(4), StackedPart(4))),
        Sharding((4, 6, 3), {0: "ep", 1: "etp"}),
        Sharding((4, 3), {0: "ep"}),
    ],
    ids=lambda sharding: f"{sharding.shape}-{dict(sharding.split)}",
)
def test_gradient_owners_count_every_element_once(sharding: Sharding) -> None:
    """The gradient norm sums owners over a model replica: an element counted twice clips too early, at TP > 1 only."""
    expert = bool({"ep", "etp"} & set(sharding.split.values()))
    for tp, ep, etp in [(1, 1, 1), (2, 1, 2), (2, 2, 1), (4, 2, 2)]:
        meshes = [Mesh.of(tp=tp, dp=4, ep=ep, etp=etp, rank=rank) for rank in range(4 * tp)]
        replica: tuple[Axis, ...] = ("ep", "etp") if expert else ("tp",)
        model = [meshes[rank] for rank in meshes[0].members(*replica)]
        try:
            owners = [mesh for mesh in model if sharding.gradient_owner(mesh)]
            locals_ = [torch.ones(sharding.local_shape(mesh)) for mesh in owners]
        except ValueError:
            continue  # the sizes don't divide at this layout
        _, count = join_locals(locals_, sharding, owners)
        assert torch.equal(count, torch.ones_like(count)), (tp, ep, etp)


@pytest.mark.parametrize(
    ("sharding", "tp"),
    [
        (Sharding((6, 4), {0: "tp"}), 4),
        (Sharding((12, 6), {0: "tp"}, parts=(StackedPart(6), StackedPart(6))), 4),
        (Sharding((16, 6), {0: "tp"}, parts=(StackedPart(4), StackedPart(12, groups=3))), 4),
    ],
)
def test_sizes_that_do_not_divide_are_refused(sharding: Sharding, tp: int) -> None:
    """Silently dropped rows would be a model smaller than asked for."""
    with expect_error(ValueError, "tp=4"):
        sharding.local_shape(Mesh.of(tp=tp))


@pytest.mark.parametrize(
    "wrong",
    [
        {"split": {}},
        {"split": {0: "tp", 1: "etp"}},
        {"split": {0: "tp"}, "pad_multiple": 2},
        {"split": {0: "tp"}, "parts": (StackedPart(2), StackedPart(3))},
        {"split": {1: "tp"}, "parts": (StackedPart(2), StackedPart(2, groups=1))},
    ],
)
def test_parts_exclude_padding_and_other_splits(wrong: dict[str, Any]) -> None:
    """Padding inside stacked parts has no defined place; rows are shared in dimension 0 only."""
    with expect_error(ValueError):
        Sharding((4, 4), **{"parts": (StackedPart(2), StackedPart(2)), **wrong})


def test_parameters_carry_their_sharding() -> None:
    """Everything that needs the layout finds it on the parameter, under its global name."""
    mesh = Mesh.of(tp=2, rank=1)
    sharding = Sharding((6, 4), {0: "tp"})
    module = nn.Module()
    module.weight = sharded_parameter(sharding, mesh, dtype=torch.bfloat16, device=torch.device("cpu"))
    [(name, parameter, found)] = list(sharded_parameters(module))
    assert (name, tuple(parameter.shape), parameter.dtype) == ("weight", (3, 4), torch.bfloat16)
    assert found is sharding is sharding_of(parameter)


@pytest.mark.parametrize("shape", [(1 << 31, 1 << 31), (1 << 70,)], ids=["product", "rows"])
def test_sizes_beyond_all_memory_are_refused(shape: tuple[int, ...]) -> None:
    """Flags of a layer whose product no tensor can have ended in torch's overflow, also with --dry-run."""
    with expect_error(ConfigError, f"{shape[0]:,}"):
        sharded_parameter(Sharding(shape), Mesh.single(), dtype=torch.float32, device=torch.device("meta"))


def test_a_parameter_without_sharding_is_a_bug_with_advice() -> None:
    """Otherwise its gradient would silently stay partial at TP > 1."""
    with pytest.raises(AssertionError, match="create it with sharded_parameter"):
        sharding_of(nn.Parameter(torch.zeros(2)))
