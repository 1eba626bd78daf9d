"""Work on rows that every context-parallel rank has, shared out among the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from megatron.core.parallel.collectives import all_gather, reduce_scatter
from megatron.core.parallel.mesh import Mesh


def shared_out(work: Callable[[Tensor], Tensor], rows: Tensor, mesh: Mesh) -> Tensor:
    """``work(rows)``, of which each rank computes an equal part, at least a row, and gathers the others.

    ``rows`` ``[n, ...]``, the same on all context-parallel ranks; ``work`` gives a row for each. Rows of zeros fill up
    the last parts. In the backward pass each rank gets the sum of what all ranks have for its rows, so parameters of
    ``work`` have the gradient of its own rows alone: like those of other parameters, these are summed over the ranks.
    """
    ranks, rank = mesh.size("cp"), mesh.rank("cp")
    size = max(1, -(-len(rows) // ranks))
    own = rows[size * rank : size * (rank + 1)]
    if len(own) < size:
        own = torch.cat((own, own.new_zeros(size - len(own), *own.shape[1:])))
    found: Tensor = _Gathered.apply(work(own), mesh)  # type: ignore[no-untyped-call]
    return found[: len(rows)]


class _Gathered(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, mesh: Mesh) -> Tensor:
        ctx.mesh = mesh
        return all_gather(x, mesh, "cp")

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(grad, ctx.mesh, "cp"), None
