"""RMS norm of groups of channels, gated by SiLU: Mamba-2's and the gated delta net's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
    how = _How(eps, groups, norm_before_gate, average)
    return _GatedNorm.apply(x, gate, weight, how)  # type: ignore[no-untyped-call, no-any-return]


_ELEMENTS = 1 << 16  # of a block of rows


class _GatedNorm(torch.autograd.Function):
    """With s = silu(z), v = x·s (or x), v̂ = v·r, r = 1 / sqrt(mean(v²) + eps), and u = dy·weight (or dy·weight·s):
    dv = r·(u - v̂·mean(u·v̂)),  dweight = Σ_rows dy·v̂ (or dy·v̂·s);  dx = dv·s, ds = dv·x (or dv, dy·weight·v̂).
    """

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, how: _How) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        given, gates = x.flatten(0, -2), gate.flatten(0, -2)
        out = torch.empty(x.shape, dtype=weight.dtype, device=x.device)
        scales = torch.empty(given.shape[0], how.groups, 1, dtype=wide, device=x.device)
        for rows in how.blocks(given):
            silu = F.silu(gates[rows].to(wide))
            value = _grouped(given[rows].to(wide) if how.norm_before_gate else silu.mul_(given[rows]), how.groups)
            mean = torch.linalg.vector_norm(value, dim=-1, keepdim=True).square_().div_(value.shape[-1])
            scales[rows] = how.averaged(mean).add_(how.eps).rsqrt_()
            found = (value * scales[rows]).flatten(1).mul_(weight)
            out.view(given.shape)[rows] = found.mul_(silu) if how.norm_before_gate else found
        ctx.save_for_backward(x, gate, weight, scales)
        ctx.how = how
        return out

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, gate, weight, scales = ctx.saved_tensors
        how: _How = ctx.how
        given, gates, upstream = x.flatten(0, -2), gate.flatten(0, -2), grad.flatten(0, -2)
        grad_x, grad_gate = (torch.empty(each.shape, dtype=each.dtype, device=x.device) for each in (x, gate))
        grad_weight = torch.zeros(weight.shape, dtype=scales.dtype, device=x.device)
        for rows in how.blocks(given):
            found_x, found_gate, product = _gradients(
                upstream[rows].to(scales.dtype), given[rows], gates[rows], weight, scales[rows], how
            )
            grad_x.view(given.shape)[rows], grad_gate.view(given.shape)[rows] = found_x, found_gate
            grad_weight += product
        return grad_x, grad_gate, grad_weight.to(weight.dtype), None


@dataclass(frozen=True)
class _How:
    """What ``gated_norm`` is asked beside its tensors."""

    eps: float
    groups: int
    norm_before_gate: bool
    average: Callable[[Tensor], Tensor] | None

    def averaged(self, mean: Tensor) -> Tensor:
        """The mean over all ranks that hold parts of a group."""
        return mean if self.average is None else self.average(mean)

    def blocks(self, x: Tensor) -> Iterator[slice]:
        """Rows of ``x`` [rows, d], as many at a time as a CPU's cache holds; all where ranks exchange means."""
        size = max(_ELEMENTS // x.shape[1], 16) if x.device.type == "cpu" and self.average is None else len(x)
        for start in range(0, len(x), size):
            yield slice(start, start + size)


def _gradients(
    upstream: Tensor, x: Tensor, gate: Tensor, weight: Tensor, scale: Tensor, how: _How
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of rows of x and gate, and of the weight from them."""
    z, groups = gate.to(scale.dtype), how.groups
    sigmoid = z.sigmoid()
    silu = sigmoid * z
    value = x if how.norm_before_gate else silu * x
    normalized = _grouped(value, groups) * scale
    product = upstream * normalized.flatten(1)
    if how.norm_before_gate:
        grad_silu = product * weight
        product.mul_(silu)
        upstream = upstream * silu
    grad_weight = product.sum(0)
    mean = how.averaged(_grouped(product.mul_(weight), groups).mean(-1, keepdim=True))
    grad_value = _grouped(upstream * weight, groups).sub_(normalized.mul_(mean)).mul_(scale).flatten(1)
    if not how.norm_before_gate:
        grad_silu = grad_value * x
        grad_value.mul_(silu)
    slope = torch.addcmul(sigmoid, silu, 1.0 - sigmoid)  # silu' = σ·(1 + z·(1 - σ))
    return grad_value, grad_silu.mul_(slope), grad_weight


def _grouped(x: Tensor, groups: int) -> Tensor:
    """[rows, d] -> [rows, groups, d / groups], a view."""
    return x.view(x.shape[0], groups, -1)
