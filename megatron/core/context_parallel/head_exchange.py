"""Sequence slices for head slices, and back: whole sequences to attend to (DeepSpeed-Ulysses, arXiv:2309.14509)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.core.context_parallel.slicing import by_rank, in_order
from megatron.core.parallel.exchange import Team, all_to_all

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def with_heads_split(attend: Attend, q: Tensor, k: Tensor, v: Tensor, team: Team) -> Tensor:
    """``attend`` on all that the team holds of the sequence, for this rank's part of the heads.

    ``q`` [s, b, n, d], ``k`` and ``v`` [s, b, g, d] -> [s, b, n·d]; n divides by the team's size, and so does g, or the
    size by g: then each key and value head goes to several ranks, and its gradient is summed where it came from.
    """
    size = team.size
    if size == 1:
        return attend(q, k, v)
    copies = size // k.shape[2] if k.shape[2] < size else 1
    parts = [_head_parts(x, size) for x in (q, k.repeat_interleave(copies, dim=2), v.repeat_interleave(copies, dim=2))]
    arrived = _exchange(torch.cat([part.flatten(1) for part in parts], dim=1), team)
    mine = torch.split(arrived, [part[0].numel() for part in parts], dim=1)
    out = attend(*(in_order(x.reshape(part.shape)) for x, part in zip(mine, parts)))  # [size·s, b, n/size·d]
    by_head = _exchange(by_rank(out, size), team)
    return by_head.permute(1, 2, 0, 3).flatten(2)


def _head_parts(x: Tensor, size: int) -> Tensor:
    """[s, b, n, d] -> [size, s, b, n/size, d]."""
    length, batch, heads, width = x.shape
    return x.reshape(length, batch, size, heads // size, width).permute(2, 0, 1, 3, 4)


def _exchange(x: Tensor, team: Team) -> Tensor:
    out: Tensor = _Exchange.apply(x, team)  # type: ignore[no-untyped-call]
    return out


class _Exchange(torch.autograd.Function):
    """All-to-all, whose transpose it is itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, team: Team) -> Tensor:
        ctx.team = team
        return all_to_all(x, team)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_to_all(grad, ctx.team), None
