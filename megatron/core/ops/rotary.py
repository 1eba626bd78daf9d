"""Rotary position embedding: rotates pairs of a head's elements by angles proportional to position (Su et al. 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from megatron.core.ops.compiled import Compiled
from megatron.core.ops.rotary_scaling import UNSCALED, Scaling


@dataclass(frozen=True)
class RotaryTable:
    """Cosine and sine of every angle, [s, b or 1, 1, pairs], in fp32 or fp64."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class Rotary:
    """How a layer turns the first ``width`` channels of its heads: pair i by ``position * base ** (-2i / width)``,
    unless ``scaling`` changes that.
    """

    width: int
    base: float = 10000.0
    scaling: Scaling = UNSCALED

    def table(self, positions: Tensor, *, length: int, dtype: torch.dtype = torch.float32) -> RotaryTable:
        """Angles at ``positions`` [s], or [b, s] where every sample has its own, on the device of ``positions``.

        ``length``: of the sequence, on which some kinds of scaling depend. Angles are computed in fp64, so that far
        positions lose nothing; ``dtype`` is that of the result: fp64 for fp64 models, fp32 for all others.
        """
        frequencies = self.scaling.frequencies(self.width, self.base, length=length)
        # A GPU takes its copy from the host's memory before this returns, and the host doesn't wait for earlier work.
        frequencies = frequencies.to(positions.device, non_blocking=True)
        per_sample = positions if positions.dim() == 2 else positions.unsqueeze(0)
        angles = per_sample.t().unsqueeze(-1).unsqueeze(-1) * frequencies  # [s, b or 1, 1, pairs]
        factor = self.scaling.attention_factor
        return RotaryTable((angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype))


RotaryTables = Mapping[Rotary, RotaryTable]
"""The tables of a microbatch; layers that turn their heads alike share one."""


def apply_rotary(x: Tensor, table: RotaryTable, *, interleaved: bool = False) -> Tensor:
    """Rotate the pairs of ``x`` [s, b, n, d]; elements beyond the table's pairs stay unchanged.

    A pair is (i, i + pairs) in each head, or (2i, 2i + 1) when ``interleaved``. Computed in the type of the table.
    """
    if not torch.is_grad_enabled():
        return _rotate(x, table.cos, table.sin, interleaved)
    return _Rotation.apply(x, table.cos, table.sin, interleaved)  # type: ignore[no-untyped-call, no-any-return]


class _Rotation(torch.autograd.Function):
    """Keeps only the table: the gradient of a rotation is the opposite rotation."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotate(x, cos, sin, interleaved)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin, ctx.interleaved), None, None, None


@Compiled
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
