"""Process groups of a mesh: every union of axes connects exactly the ranks that the grid names."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

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
