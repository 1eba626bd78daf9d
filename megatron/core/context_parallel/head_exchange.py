"""Slices of the sequence for slices of the heads, among ranks that divide a sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from megatron.core.parallel.exchange import RankGroup, all_to_all


def exchange(x: Tensor, peers: RankGroup) -> Tensor:
    """Send ``x[r]`` to rank r of the group and return what all have sent here, ``[size, …]``; differentiable."""
    return _Exchange.apply(x, peers)  # type: ignore[no-untyped-call, no-any-return]


class _Exchange(torch.autograd.Function):
    """All-to-all, which is its own transpose."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, peers: RankGroup) -> Tensor:
        ctx.peers = peers
        return all_to_all(x, peers)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_to_all(grad, ctx.peers), None
