"""Dropout that draws from the generator it is given, and keeps one byte per element."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def dropout(x: Tensor, p: float, generator: torch.Generator) -> Tensor:
    """Zero each element with probability ``p``, scale the others by ``1 / (1 - p)``; ``x`` itself when ``p`` is 0."""
    if p == 0.0:
        return x
    result: Tensor = _Dropout.apply(x, p, generator)  # type: ignore[no-untyped-call]
    return result


def bias_dropout_add(x: Tensor, bias: Tensor | None, residual: Tensor, p: float, generator: torch.Generator) -> Tensor:
    """``residual + dropout(x + bias)``: how a sub-layer rejoins the residual stream. All [s, b, h] but ``bias`` [h].

    The result has the wider type of ``x`` and ``residual``.
    """
    branch = x if bias is None else x + bias
    return residual + dropout(branch, p, generator)


class _Dropout(torch.autograd.Function):
    """dx = dy·mask / (1 - p), the mask kept as bool."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, generator: torch.Generator) -> Tensor:
        keep = torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(1.0 - p, generator=generator)
        ctx.save_for_backward(keep)
        ctx.scale = 1.0 / (1.0 - p) if p < 1.0 else 0.0
        return (x * keep).mul_(ctx.scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (keep,) = ctx.saved_tensors
        return (grad * keep).mul_(ctx.scale), None, None
