"""RMS norm of groups of channels, gated by SiLU: Mamba-2's and the gated delta net's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override


def gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    *,
    eps: float,
    groups: int = 1,
    norm_before_gate: bool = False,
    average: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """``norm(x·silu(gate))·weight``, or with ``norm_before_gate`` ``norm(x)·weight·silu(gate)``; norm divides each of
    the ``groups`` of the last dim by its root mean square, ``sqrt(mean(v²) + eps)``.

    ``x`` and ``gate`` [..., d], ``weight`` [d] -> [..., d] in the type of ``weight``; computed in fp32 or wider, and
    keeps ``x``, ``gate`` and one number per group. ``average``: where ranks hold parts of a group, the mean of their
    means; it is called in the forward and in the backward pass.
    """
    return _GatedNorm.apply(x, gate, weight, eps, groups, norm_before_gate, average)  # type: ignore[no-untyped-call, no-any-return]


class _GatedNorm(torch.autograd.Function):
    """With s = silu(z), v = x·s (or x), v̂ = v·r, r = 1 / sqrt(mean(v²) + eps), and u = dy·weight (or dy·weight·s):
    dv = r·(u - v̂·mean(u·v̂)),  dweight = Σ_rows dy·v̂ (or dy·v̂·s);  dx = dv·s, ds = dv·x (or dv, dy·weight·v̂).
    """

    @staticmethod
    @override
    def forward(
        ctx: Any,
        x: Tensor,
        gate: Tensor,
        weight: Tensor,
        eps: float,
        groups: int,
        norm_before_gate: bool,
        average: Callable[[Tensor], Tensor] | None,
    ) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        silu = F.silu(gate.to(wide))
        value = x.to(wide) if norm_before_gate else silu.mul_(x)
        by_group = _grouped(value, groups)
        mean = torch.linalg.vector_norm(by_group, dim=-1, keepdim=True).square_().div_(by_group.shape[-1])
        scale = (mean if average is None else average(mean)).add_(eps).rsqrt_()
        out = (by_group * scale).flatten(-2).mul_(weight)
        if norm_before_gate:
            out.mul_(silu)
        ctx.save_for_backward(x, gate, weight, scale)
        ctx.norm_before_gate, ctx.average = norm_before_gate, average
        return out.to(weight.dtype)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None, None]:
        x, gate, weight, scale = ctx.saved_tensors
        wide, groups = scale.dtype, scale.shape[-2]
        z, upstream = gate.to(wide), grad.to(wide)
        sigmoid = z.sigmoid()
        silu = sigmoid * z
        value = x.to(wide) if ctx.norm_before_gate else silu * x
        normalized = (_grouped(value, groups) * scale).flatten(-2)
        product = upstream * normalized
        if ctx.norm_before_gate:
            grad_silu = product * weight
            product.mul_(silu)
            upstream = upstream * silu
        grad_weight = product.flatten(0, -2).sum(0).to(weight.dtype)
        mean = _grouped(product.mul_(weight), groups).mean(-1, keepdim=True)
        mean = mean if ctx.average is None else ctx.average(mean)
        inner = _grouped(upstream * weight, groups)
        grad_value = inner.sub_(_grouped(normalized, groups).mul_(mean)).mul_(scale).flatten(-2)
        if ctx.norm_before_gate:
            grad_x = grad_value
        else:
            grad_x, grad_silu = grad_value * silu, grad_value.mul_(x)
        # silu' = σ·(1 + z·(1 - σ)) = σ + silu·(1 - σ)
        slope = torch.addcmul(sigmoid, silu, 1.0 - sigmoid)
        return grad_x.to(x.dtype), grad_silu.mul_(slope).to(gate.dtype), grad_weight, None, None, None, None


def _grouped(x: Tensor, groups: int) -> Tensor:
    """[..., d] -> [..., groups, d / groups], a view."""
    return x.view(*x.shape[:-1], groups, -1)
