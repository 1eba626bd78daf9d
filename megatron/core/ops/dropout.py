"""Dropout that draws from the generator it is given, and keeps one byte per element."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override


def dropout(x: Tensor, p: float, generator: torch.Generator | None) -> Tensor:
    """Zero each element with probability ``p``, scale the others by ``1 / (1 - p)``; ``x`` itself when ``p`` is 0.

    ``generator``: may be None only when ``p`` is 0.
    """
    if p == 0.0:
        return x
    return _Dropout.apply(x, p, generator)  # type: ignore[no-untyped-call, no-any-return]


def draw_kept(x: Tensor, p: float, generator: torch.Generator | None) -> Tensor:
    """Which elements of a tensor like ``x`` survive, as bool.

    Each is decided by 16 random bits, so ``p`` is rounded to a multiple of 2⁻¹⁶. Drawing 64 bits at a time is four
    times as fast as ``bernoulli_``, which on a CPU runs in one thread.
    """
    assert generator is not None, "dropout needs a generator"
    words = torch.empty(-(-x.numel() // 4), dtype=torch.int64, device=x.device)
    words.random_(-(1 << 63), None, generator=generator)
    return words.view(torch.int16)[: x.numel()].view(x.shape) < _kept_values(p) - (1 << 15)


def scale_kept(x: Tensor, kept: Tensor, p: float) -> Tensor:
    """``x·kept / (1 - p)``: dropout with the mask ``kept``. The gradient is computed by the same function."""
    values = _kept_values(p)
    return (x * kept).mul_((1 << 16) / values if values else 0.0)


def _kept_values(p: float) -> int:
    """How many of the 2¹⁶ values of 16 bits mean that an element survives; at most the largest int16 threshold."""
    return min(round((1.0 - p) * (1 << 16)), (1 << 16) - 1)


def generator_state(p: float, generator: torch.Generator | None) -> Tensor | None:
    """State from which dropout with ``p`` will draw, for ``generator_at``; None when ``p`` is 0."""
    return generator.get_state() if generator is not None and p > 0.0 else None


def seed_of(p: float, generator: torch.Generator | None) -> int | None:
    """The seed that ``generator`` was given last, for kernels that draw from no other than torch's own generator. A
    layer is given a seed of its own for each microbatch. None when ``p`` is 0.
    """
    return generator.initial_seed() if generator is not None and p > 0.0 else None


def generator_at(state: Tensor | None, device: torch.device) -> torch.Generator | None:
    """A generator on ``device`` that draws again what another one drew from ``state`` on."""
    return None if state is None else torch.Generator(device).set_state(state)


class _Dropout(torch.autograd.Function):
    """dx = dy·kept / (1 - p)."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, p: float, generator: torch.Generator | None) -> Tensor:
        kept = draw_kept(x, p, generator)
        ctx.save_for_backward(kept)
        ctx.p = p
        return scale_kept(x, kept, p)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (kept,) = ctx.saved_tensors
        return scale_kept(grad, kept, ctx.p), None, None
