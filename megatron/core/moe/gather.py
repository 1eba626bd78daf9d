"""The allgather dispatcher: every rank gathers the tokens of all ranks, and results are reduce-scattered.

It sends the same bytes whatever tokens choose, and less than an all-to-all if each token chooses at least as many
experts as there are ranks. Ranks must hold equally many tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from megatron.core.moe.dispatch import DispatchPlan, packed, plan_local_dispatch, unpacked
from megatron.core.moe.routing import Routing
from megatron.core.parallel.collectives import all_gather, reduce_scatter
from megatron.core.parallel.mesh import Mesh


def gather_tokens(x: Tensor, weights: Tensor, mesh: Mesh) -> tuple[Tensor, Tensor]:
    """Tokens [t, h] and their weights [t, k] of all ranks over ``ep`` and ``etp``."""
    whole, of_whole = _Gather.apply(x, weights, mesh)  # type: ignore[no-untyped-call]
    return whole, of_whole


def scatter_tokens(parts: Tensor, mesh: Mesh) -> Tensor:
    """The sums [t, h] of what all ranks computed of this rank's tokens."""
    return _Scatter.apply(parts, mesh)  # type: ignore[no-untyped-call, no-any-return]


def plan_dispatch_of_all(routing: Routing, *, num_experts: int, mesh: Mesh) -> DispatchPlan:
    """The plan of all ranks' tokens to the experts of this one. A small collective."""
    held = num_experts // mesh.size("ep")
    ids = routing.ids if routing.kept is None else routing.ids.masked_fill(~routing.kept, -1)
    local = all_gather(ids, mesh, "ep", "etp") - held * mesh.rank("ep")
    is_here = (local >= 0) & (local < held)
    return plan_local_dispatch(Routing(local, routing.weights, is_here), num_experts=held, mesh=mesh)


class _Gather(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, weights: Tensor, mesh: Mesh) -> tuple[Tensor, Tensor]:
        ctx.mesh = mesh
        both = all_gather(packed(x, weights), mesh, "ep", "etp")
        return unpacked(both, x.shape[1], weights.dtype)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor, grad_weights: Tensor) -> tuple[Tensor, Tensor, None]:
        return (
            reduce_scatter(grad, ctx.mesh, "ep", "etp"),
            reduce_scatter(grad_weights, ctx.mesh, "ep", "etp"),
            None,
        )


class _Scatter(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, parts: Tensor, mesh: Mesh) -> Tensor:
        ctx.mesh = mesh
        return reduce_scatter(parts, mesh, "ep", "etp")

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather(grad, ctx.mesh, "ep", "etp"), None
