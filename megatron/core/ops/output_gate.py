"""A gate on the result of attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override


def sigmoid_gated(x: Tensor, gate: Tensor) -> Tensor:
    """``x·sigmoid(gate)``, the sigmoid in fp32 or wider; keeps ``x`` and ``gate``. Same shapes."""
    return _SigmoidGated.apply(x, gate)  # type: ignore[no-untyped-call, no-any-return]


class _SigmoidGated(torch.autograd.Function):
    """With s = σ(gate): y = x·s;  dx = dy·s,  dgate = dy·x·s·(1 - s)."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(x, gate)
        return (x * _sigmoid(gate)).to(x.dtype)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, gate = ctx.saved_tensors
        opened = _sigmoid(gate)
        slope = torch.addcmul(opened, opened, opened, value=-1.0)
        return (grad * opened).to(x.dtype), slope.mul_(grad).mul_(x).to(gate.dtype)


def _sigmoid(gate: Tensor) -> Tensor:
    return gate.to(torch.promote_types(gate.dtype, torch.float32)).sigmoid()
