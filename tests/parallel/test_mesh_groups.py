"""Process groups of a mesh: every union of axes connects exactly the ranks that the grid names."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron.core.parallel.collectives import all_reduce
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.grid import Axis
from tests.harness import run_ranks

UNIONS: list[tuple[Axis, ...]] = [
    ("tp",),
    ("dp",),
    ("pp",),
    ("dp", "cp"),
    ("pp", "tp"),
    ("pp", "dp", "cp", "tp"),
    ("edp",),
    ("ep",),
    ("ep", "etp"),
]


def sums_over_every_union(context: ParallelContext) -> None:
    mesh = context.mesh
    for union in UNIONS:
        group = mesh.group(*union)
        if group is None:
            assert mesh.size(*union) == 1
            continue
        assert dist.get_process_group_ranks(group) == list(mesh.members(*union))
        assert dist.get_rank(group) == mesh.rank(*union)
        total = torch.tensor([2.0**mesh.world_rank], dtype=torch.float64)
        dist.all_reduce(total, group=group)
        assert total.item() == sum(2.0**member for member in mesh.members(*union)), union


@pytest.mark.parametrize("pp_before_dp", [True, False])
def test_groups_hold_the_ranks_of_the_grid(pp_before_dp: bool) -> None:
    """A gradient summed over the wrong ranks is silently wrong; each rank's power of two shows who took part."""
    run_ranks(sums_over_every_union, tp=2, dp=2, pp=2, ep=2, etp=1, pp_before_dp=pp_before_dp)


def unions_of_equal_ranks_share_a_group(context: ParallelContext) -> None:
    mesh = context.mesh
    assert mesh.group("tp") is mesh.group("tp", "cp")
    assert mesh.group("pp", "dp", "cp", "tp") is dist.group.WORLD


def test_unions_of_equal_ranks_share_a_group() -> None:
    """On GPUs each group costs memory and connections; the same ranks need one."""
    run_ranks(unions_of_equal_ranks_share_a_group, tp=2, dp=2)


def stages_with_different_groups(context: ParallelContext) -> float:
    mesh = context.mesh
    if mesh.rank("pp") == 1:
        mesh.group("cp")  # as attention does, which a stage with the embedding alone doesn't have
    return all_reduce(torch.ones(100_000), mesh, "pp", "dp", "cp").sum().item()


def test_stages_may_need_different_groups() -> None:
    """Ranks would wait for each other in groups of different names until the run times out."""
    assert run_ranks(stages_with_different_groups, pp=2, cp=2, tp=2) == [400_000.0] * 8
