"""A rank's place on the dense and the expert grid."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from megatron.core.parallel.grid import RankGrid
from megatron.core.parallel.mesh import Mesh
from tests.harness.sentences import expect_error


def test_position_is_the_closed_form_on_both_orders() -> None:
    """rank = tp + TP·(cp + CP·(dp + DP·pp)), or with pp and dp exchanged; experts likewise on the same ranks."""
    for tp, cp, dp, pp in itertools.product((1, 2), (1, 2), (1, 3), (1, 2)):
        for rank in range(tp * cp * dp * pp):
            mesh = Mesh.of(tp=tp, cp=cp, dp=dp, pp=pp, rank=rank)
            assert rank == mesh.rank("tp") + tp * (mesh.rank("cp") + cp * (mesh.rank("dp") + dp * mesh.rank("pp")))
            swapped = Mesh.of(tp=tp, cp=cp, dp=dp, pp=pp, rank=rank, pp_before_dp=False)
            assert rank == swapped.rank("tp") + tp * (
                swapped.rank("cp") + cp * (swapped.rank("pp") + pp * swapped.rank("dp"))
            )


@pytest.mark.parametrize(
    ("pp_before_dp", "ep", "etp"),
    [(first, ep, etp) for first in (True, False) for ep in (1, 2, 4) for etp in (1, 2, 4) if ep * etp <= 8],
)
def test_expert_grid_covers_the_same_stage(pp_before_dp: bool, ep: int, etp: int) -> None:
    """Dense and expert parameters of a layer live on the same pipeline stage, whatever the expert sizes.

    With pp inside dp, experts' gradients were summed over stages unless ep and etp divided the ranks as tp and cp do.
    """
    for rank in range(16):
        mesh = Mesh.of(tp=2, cp=2, dp=2, pp=2, ep=ep, etp=etp, rank=rank, pp_before_dp=pp_before_dp)
        assert mesh.size("edp", "ep", "etp") == mesh.size("dp", "cp", "tp") == 8
        assert mesh.members("edp", "ep", "etp") == mesh.members("dp", "cp", "tp")
        assert mesh.expert.coordinates(mesh.expert_number)["pp"] == mesh.dense.coordinates(rank)["pp"]
        for axes in (("edp",), ("ep",), ("etp",), ("ep", "etp")):
            assert {*mesh.members(*axes)} <= {*mesh.members("dp", "cp", "tp")}
            assert len(mesh.members(*axes)) == mesh.size(*axes)


def test_expert_tensor_size_follows_the_dense_one() -> None:
    """``--expert-tensor-parallel-size`` left out means the dense size."""
    assert Mesh.of(tp=2, dp=4, ep=2).expert.axes == {"dc": 1, "pp": 1, "edp": 2, "ep": 2, "etp": 2}


def test_unions_have_positions_in_grid_order() -> None:
    """Who owns which shard of a buffer reduced over dp and cp is this number."""
    ranks = [Mesh.of(tp=2, cp=2, dp=2, rank=rank) for rank in range(8)]
    assert [mesh.rank("dp", "cp") for mesh in ranks] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [mesh.rank("cp", "dp") for mesh in ranks] == [mesh.rank("dp", "cp") for mesh in ranks]
    assert ranks[5].members("dp", "cp") == (1, 3, 5, 7)


@pytest.mark.parametrize("pp_before_dp", [True, False])
def test_neighbours_are_in_one_copy(pp_before_dp: bool) -> None:
    """Weights of layers would travel between nodes; experts lie in the copies that all else lies in."""
    sizes: dict[str, Any] = {
        "tp": 2,
        "cp": 2,
        "dp": 4,
        "pp": 2,
        "ep": 2,
        "etp": 1,
        "copies": 2,
        "pp_before_dp": pp_before_dp,
    }
    for rank in range(32):
        mesh = Mesh.of(**sizes, rank=rank)
        stage = mesh.members("dp", "cp", "tp")
        halves = [{*stage[:8]}, {*stage[8:]}]
        for axes in (("dp", "cp"), ("edp",)):
            inner, outer = mesh.levels(axes)
            assert mesh.size(*inner) * mesh.size(*outer) == mesh.size(*axes) and mesh.size(*outer) == 2
            assert any({*mesh.members(*inner)} <= half for half in halves)
            assert all(len({*mesh.members(*outer)} & half) == 1 for half in halves)
            others = [Mesh.of(**sizes, rank=each) for each in mesh.members(*outer)]
            assert {each.rank(*inner) for each in others} == {mesh.rank(*inner)}
    assert Mesh.of(dp=4).levels(("dp", "cp")) == (("dp", "cp"), ())


def test_a_single_rank_needs_no_group() -> None:
    """Tools and notebooks build layers without a launcher."""
    mesh = Mesh.single()
    assert mesh.world_size == 1
    assert all(
        mesh.group(axis) is None and mesh.rank(axis) == 0 for axis in ("pp", "dp", "cp", "tp", "edp", "ep", "etp")
    )
    assert mesh.group("dp", "cp") is None


def test_coordinates_read_as_in_messages() -> None:
    """Every multi-rank error starts with this line."""
    assert Mesh.of(tp=4, pp=2, rank=7).describe() == "pp=1 dp=0 cp=0 tp=3"


def test_expert_sizes_that_do_not_divide_are_refused() -> None:
    """Otherwise some rank would have no expert."""
    with expect_error(ValueError, "6 ranks", "4"):
        Mesh.of(tp=2, dp=3, ep=2)


def test_grids_over_different_worlds_are_refused() -> None:
    """Both grids number the same ranks."""
    with expect_error(ValueError, "2 ranks", "4"):
        Mesh(RankGrid({"pp": 1, "dp": 1, "cp": 1, "tp": 2}), RankGrid({"pp": 1, "edp": 4, "ep": 1, "etp": 1}))


@pytest.mark.parametrize("pp_before_dp", [True, False])
def test_parts_with_whole_sequences_have_the_same_tensor_parallel_groups(pp_before_dp: bool) -> None:
    """An encoder of images on context-parallel ranks would exchange parts of its layers with ranks of other parts."""
    for rank in range(16):
        mesh = Mesh.of(tp=2, cp=2, dp=2, pp=2, rank=rank, pp_before_dp=pp_before_dp)
        whole = mesh.of_whole_sequences()
        assert (whole.size("cp"), whole.rank("cp"), whole.world_size) == (1, 0, 16)
        assert whole.members("tp") == mesh.members("tp")
    assert Mesh.single().of_whole_sequences().size("cp") == 1
