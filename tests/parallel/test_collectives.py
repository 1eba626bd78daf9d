"""Collectives along every dimension of a tensor, against what one process computes from all parts."""

from __future__ import annotations

import torch

from megatron.core.parallel.collectives import all_gather, all_reduce, reduce_scatter
from megatron.core.parallel.context import ParallelContext
from tests.harness import run_ranks


def parts(size: int) -> list[torch.Tensor]:
    return [torch.arange(24.0).view(2, 3, 4) * 10 + 1000 * rank for rank in range(size)]


def along_every_dimension(context: ParallelContext) -> None:
    mesh = context.mesh
    everyone = parts(mesh.size("tp"))
    mine = everyone[mesh.rank("tp")]
    for dim in range(3):
        torch.testing.assert_close(all_gather(mine, mesh, "tp", dim=dim), torch.cat(everyone, dim=dim), rtol=0, atol=0)
    for dim in (0, 2):
        expected = torch.stack(everyone).sum(0).chunk(mesh.size("tp"), dim=dim)[mesh.rank("tp")]
        torch.testing.assert_close(reduce_scatter(mine, mesh, "tp", dim=dim), expected, rtol=0, atol=0)
    transposed = mine.clone().transpose(0, 2)  # not contiguous: the result must land in the view
    all_reduce(transposed, mesh, "tp")
    torch.testing.assert_close(transposed, torch.stack(everyone).sum(0).transpose(0, 2), rtol=0, atol=0)


def test_along_every_dimension() -> None:
    """Gathering along another dimension than the first failed on gloo: text generation on two ranks crashed."""
    run_ranks(along_every_dimension, tp=2)
