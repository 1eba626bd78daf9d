"""Causal convolution of each channel by itself, over a few earlier tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    initial: Tensor | None = None,
    document_ids: Tensor | None = None,
    initial_ids: Tensor | None = None,
) -> Tensor:
    """``y_t = bias + Σ_j weight_j·x_{t-k+1+j}`` for every channel, [b, l, c], in the type of ``x``.

    Shapes: ``x`` [b, l, c], ``weight`` [c, 1, k], ``bias`` [c]; ``initial`` [b, k - 1, c]: the rows before the first,
    zeros if None. A token sees those of its own run of equal numbers in ``document_ids`` [b, l] only. ``initial_ids``
    [b, k - 1]: the documents of the ``initial`` rows; None: that of the first token.
    """
    seen = None if document_ids is None else _seen(document_ids, initial_ids, weight.shape[2])
    return _CausalConv.apply(x, weight, bias, initial, seen)  # type: ignore[no-untyped-call, no-any-return]


def _seen(document_ids: Tensor, initial_ids: Tensor | None, taps: int) -> Tensor:
    """Whether a token sees the row 1, 2 … k - 1 places before it, [k - 1, b, l, 1]."""
    earlier = document_ids[:, :1].expand(-1, taps - 1) if initial_ids is None else initial_ids
    every = torch.cat((earlier, document_ids), dim=1)
    length, begins = document_ids.shape[1], every[:, 1:] != every[:, :-1]
    # Runs, not numbers, are compared: a number may come back after another document.
    runs = torch.nn.functional.pad(begins.cumsum(dim=1), (1, 0))
    own = runs[:, taps - 1 :]
    same = [own == runs[:, taps - 1 - back : taps - 1 - back + length] for back in range(1, taps)]
    return torch.stack(same).unsqueeze(-1)


class _CausalConv(torch.autograd.Function):
    """A multiply-add for each tap, on rows of channels as they lie; keeps ``x``.

    dx_t = Σ_j weight_j·dy_{t+k-1-j};  dweight_j = Σ_t dy_t·x_{t-k+1+j};  dbias = Σ_t dy_t.
    """

    @staticmethod
    @override
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, initial: Tensor | None, seen: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight, initial, seen)
        ctx.has_bias = bias is not None
        taps = weight.squeeze(1).t().contiguous()  # [k, c]
        out = x * taps[-1] if bias is None else torch.addcmul(bias, x, taps[-1])
        for back, rows, given in _earlier(x, initial, taps.shape[0]):
            tap, target = taps[-1 - back], out[:, rows]
            if seen is None:
                target.addcmul_(given, tap)
            else:
                target.addcmul_(given * seen[back - 1][:, rows], tap)
        return out

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, None]:
        x, weight, initial, seen = ctx.saved_tensors
        taps = weight.squeeze(1).t().contiguous()
        wide = torch.promote_types(weight.dtype, torch.float32)
        grad_taps = torch.empty(taps.shape, dtype=wide, device=x.device)
        grad_x = grad * taps[-1]
        grad_initial = None if initial is None else torch.zeros_like(initial)
        grad_taps[-1] = (grad * x).sum((0, 1), dtype=wide)
        for back in range(1, taps.shape[0]):
            grad_taps[-1 - back] = 0.0
        for back, rows, given in _earlier(x, initial, taps.shape[0]):
            upstream, tap = grad[:, rows], taps[-1 - back]
            if seen is not None:
                upstream = upstream * seen[back - 1][:, rows]
            grad_taps[-1 - back] += (upstream * given).sum((0, 1), dtype=wide)
            if rows.start == back:
                grad_x[:, : x.shape[1] - back].addcmul_(upstream, tap)
            elif grad_initial is not None:
                first = initial.shape[1] - back
                grad_initial[:, first : first + upstream.shape[1]].addcmul_(upstream, tap)
        grad_weight = grad_taps.t().unsqueeze(1).to(weight.dtype)
        grad_bias = grad.sum((0, 1), dtype=wide).to(weight.dtype) if ctx.has_bias else None
        return grad_x, grad_weight, grad_bias, grad_initial, None


def _earlier(x: Tensor, initial: Tensor | None, taps: int) -> Iterator[tuple[int, slice, Tensor]]:
    """For each number of places back: tokens of ``x``, and the rows that lie so many places before them. Tokens from
    the first on see ``initial`` rows, those after them rows of ``x``.
    """
    length = x.shape[1]
    for back in range(1, taps):
        if initial is not None:
            count = min(back, length)
            first = initial.shape[1] - back
            yield back, slice(0, count), initial[:, first : first + count]
        if back < length:
            yield back, slice(back, length), x[:, : length - back]
