"""Rotary position embedding: rotates pairs of a head's elements by angles proportional to position (Su et al. 2021)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Llama 3.1: pairs that turn 4 times within the original context keep their frequency, those below one turn are slowed.
_LLAMA3_ORIGINAL_LENGTH = 8192
_LLAMA3_LOW, _LLAMA3_HIGH = 1.0, 4.0


@dataclass(frozen=True)
class RotaryTable:
    """Cosine and sine of every angle, [s, b or 1, 1, pairs], in fp32 or fp64."""

    cos: Tensor
    sin: Tensor


def rotary_frequencies(
    head_width: int,
    *,
    percent: float = 1.0,
    base: float = 10000.0,
    interpolation_factor: float | None = None,
    llama3_factor: float | None = None,
) -> Tensor:
    """Angle per position of each pair, [pairs] in fp64 on the CPU, over the first ``percent`` of the head.

    ``interpolation_factor`` divides positions, to stretch a trained context (linear scaling, Chen et al. 2023);
    ``llama3_factor`` slows only the frequencies that the original context of 8192 doesn't cover (Llama 3.1).
    """
    width = int(head_width * percent)
    width -= width % 2
    frequencies = base ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    if llama3_factor is not None:
        turns = _LLAMA3_ORIGINAL_LENGTH * frequencies / (2 * math.pi)  # within the original context
        kept = ((turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)).clamp(0.0, 1.0)
        frequencies = frequencies * (kept + (1.0 - kept) / llama3_factor)
    return frequencies if interpolation_factor is None else frequencies / interpolation_factor


def rotary_table(frequencies: Tensor, positions: Tensor, *, dtype: torch.dtype = torch.float32) -> RotaryTable:
    """Angles at ``positions`` [s], or [b, s] where every sample has its own, on the device of ``positions``.

    Angles are computed in fp64, so that far positions lose nothing; ``dtype`` is that of the result: fp64 for fp64
    models, fp32 for all others.
    """
    per_sample = positions if positions.dim() == 2 else positions.unsqueeze(0)
    angles = per_sample.t().unsqueeze(-1).unsqueeze(-1) * frequencies.to(positions.device)  # [s, b or 1, 1, pairs]
    return RotaryTable(angles.cos().to(dtype), angles.sin().to(dtype))


def apply_rotary(x: Tensor, table: RotaryTable, *, interleaved: bool = False) -> Tensor:
    """Rotate the pairs of ``x`` [s, b, n, d]; elements beyond the table's pairs stay unchanged.

    A pair is (i, i + pairs) in each head, or (2i, 2i + 1) when ``interleaved``. Computed in the type of the table.
    """
    return _Rotation.apply(x, table.cos, table.sin, interleaved)  # type: ignore[no-untyped-call, no-any-return]


class _Rotation(torch.autograd.Function):
    """Keeps only the table: the gradient of a rotation is the opposite rotation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotate(x, cos, sin, interleaved)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin, ctx.interleaved), None, None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    pairs = cos.shape[-1]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    first, second = _pairs(x, pairs, interleaved)
    turned_first, turned_second = _pairs(out, pairs, interleaved)
    turned_first.copy_((first * cos).sub_(second * sin))
    turned_second.copy_((second * cos).add_(first * sin))
    out[..., 2 * pairs :].copy_(x[..., 2 * pairs :])
    return out


def _pairs(x: Tensor, pairs: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    turning = x[..., : 2 * pairs]
    if interleaved:
        return turning[..., 0::2], turning[..., 1::2]
    return turning[..., :pairs], turning[..., pairs:]
