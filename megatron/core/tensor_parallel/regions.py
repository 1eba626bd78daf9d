"""The two pairs of collectives that tensor and sequence parallelism consist of.

Between ``enter`` and ``leave`` every rank computes with its part of the weights on the whole sequence. Outside, with
sequence parallelism each rank holds its part of the sequence; without, every rank holds all of it.

======= ============================ ============================
        with sequence parallelism    without
======= ============================ ============================
enter   all-gather | reduce-scatter  identity | all-reduce
leave   reduce-scatter | all-gather  all-reduce | identity
======= ============================ ============================

(forward | backward; Megatron-LM papers arXiv:1909.08053 and arXiv:2205.05198 call them f, g and their sequence forms.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from megatron.core.parallel.collectives import all_gather, all_reduce, reduce_scatter
from megatron.core.parallel.context import ParallelContext


class _Enter(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, context: ParallelContext) -> Tensor:
        ctx.context = context
        return all_gather(x, context.mesh, "tp") if context.splits_sequence else x.view_as(x)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        context: ParallelContext = ctx.context
        if context.splits_sequence:
            return reduce_scatter(grad, context.mesh, "tp"), None
        return all_reduce(grad, context.mesh, "tp"), None


class _Leave(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, context: ParallelContext) -> Tensor:
        ctx.context = context
        if context.splits_sequence:
            return reduce_scatter(x, context.mesh, "tp")
        return all_reduce(x.detach(), context.mesh, "tp")  # in place: autograd would notice if it had kept x

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        context: ParallelContext = ctx.context
        return (all_gather(grad, context.mesh, "tp") if context.splits_sequence else grad), None


class _OwnRows(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, context: ParallelContext) -> Tensor:
        ctx.context, ctx.rows = context, x.shape[0]
        return _own_part(x, context)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather(grad, ctx.context.mesh, "tp")[: ctx.rows], None


class _AllRows(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, context: ParallelContext, rows: int) -> Tensor:
        ctx.context = context
        return all_gather(x, context.mesh, "tp")[:rows]

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _own_part(grad, ctx.context), None, None


def _own_part(x: Tensor, context: ParallelContext) -> Tensor:
    ranks, rank = context.mesh.size("tp"), context.mesh.rank("tp")
    size = -(-x.shape[0] // ranks)
    mine = x[size * rank : size * (rank + 1)]
    return mine.contiguous() if len(mine) == size else torch.cat((mine, mine.new_zeros(size - len(mine), *x.shape[1:])))


class _FirstToken(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, context: ParallelContext) -> Tensor:
        ctx.length, ctx.is_mine = x.shape[0], context.mesh.rank("tp") == 0
        return all_reduce(x[0].detach() * ctx.is_mine, context.mesh, "tp")

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad_x = grad.new_zeros(ctx.length, *grad.shape)
        if ctx.is_mine:
            grad_x[0] = grad
        return grad_x, None


def first_token(x: Tensor, context: ParallelContext) -> Tensor:
    """Position 0 of the sequence ``[s, b, h]``, as ``[b, h]``, the same on all tensor-parallel ranks.

    With sequence parallelism the first rank holds it and gets its gradient, which is whole on every rank.
    """
    if context.sequence_parts == 1:
        return x[0]
    return _FirstToken.apply(x, context)  # type: ignore[no-untyped-call, no-any-return]


def enter(x: Tensor, context: ParallelContext) -> Tensor:
    """Enter a tensor-parallel region, before a column-split matmul: ``[s, b, h]`` to ``[S, b, h]``; gradients are
    summed on the way back.

    The sum overwrites the incoming gradient, which a matmul has made and nothing else uses.
    """
    if context.mesh.size("tp") == 1:
        return x
    return _Enter.apply(x, context)  # type: ignore[no-untyped-call, no-any-return]


def leave(x: Tensor, context: ParallelContext) -> Tensor:
    """Leave a tensor-parallel region, after a row-split matmul: partial sums ``[S, b, h]`` to whole ``[s, b, h]``, in
    place where possible.
    """
    if context.mesh.size("tp") == 1:
        return x
    return _Leave.apply(x, context)  # type: ignore[no-untyped-call, no-any-return]


def own_rows(x: Tensor, context: ParallelContext) -> Tensor:
    """This rank's share of rows ``[t, …]`` that every tensor-parallel rank holds, equally many on each; the last ranks'
    may end with zeros. With sequence parallelism a rank holds its own anyway. Gradients are gathered on the way back.
    """
    if context.splits_sequence or context.mesh.size("tp") == 1:
        return x
    return _OwnRows.apply(x, context)  # type: ignore[no-untyped-call, no-any-return]


def all_rows(x: Tensor, context: ParallelContext, *, rows: int) -> Tensor:
    """The ``rows`` of all ranks, of which this one has its ``own_rows``: the way back."""
    if context.splits_sequence or context.mesh.size("tp") == 1:
        return x
    return _AllRows.apply(x, context, rows)  # type: ignore[no-untyped-call, no-any-return]


def sequence_slice(x: Tensor, context: ParallelContext, *, dim: int = 0) -> Tensor:
    """This rank's part of something every rank holds along the sequence, such as positions. No gradient is summed."""
    if not context.splits_sequence:
        return x
    return x.chunk(context.mesh.size("tp"), dim=dim)[context.mesh.rank("tp")]
