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


_ELEMENTS = 1 << 17  # of a block of rows


class _CausalConv(torch.autograd.Function):
    """A multiply-add for each tap, on rows of channels as they lie, a few rows at a time; keeps ``x``.

    dx_t = Σ_j weight_j·dy_{t+k-1-j};  dweight_j = Σ_t dy_t·x_{t-k+1+j};  dbias = Σ_t dy_t. Sums are in fp32 or wider.
    """

    @staticmethod
    @override
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, initial: Tensor | None, seen: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight, initial, seen)
        ctx.has_bias = bias is not None
        taps, earlier = _taps(weight), weight.shape[2] - 1
        wide_bias = None if bias is None else bias.to(taps.dtype)
        before = x.new_zeros(x.shape[0], earlier, x.shape[2]) if initial is None else initial
        first = torch.cat((before, x[:, :earlier]), dim=1)  # what the first rows see
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for rows in (slice(0, first.shape[1] - earlier), *_blocks(x, first.shape[1] - earlier)):
            given = (x[:, rows.start - earlier : rows.stop] if rows.start else first).to(taps.dtype)
            count, now = rows.stop - rows.start, given[:, earlier:]
            total = now * taps[0] if wide_bias is None else torch.addcmul(wide_bias, now, taps[0])
            for back in range(1, earlier + 1):
                past = given[:, earlier - back : earlier - back + count]
                total.addcmul_(past if seen is None else past * seen[back - 1][:, rows], taps[back])
            out[:, rows] = total
        return out

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, None]:
        x, weight, initial, seen = ctx.saved_tensors
        taps = _taps(weight)
        grad_taps = torch.zeros_like(taps)
        grad_x, grad_initial = torch.empty(x.shape, dtype=x.dtype, device=x.device), None
        grad_bias = grad.sum((0, 1), dtype=taps.dtype).to(weight.dtype) if ctx.has_bias else None
        for rows in _blocks(x, 0):
            grad_x[:, rows] = _gradients(x[:, rows], rows.start, grad, taps, seen, grad_taps)
        if initial is not None:
            found = _gradients(initial, -initial.shape[1], grad, taps, seen, grad_taps)
            grad_initial = found.to(initial.dtype)
        grad_weight = grad_taps.flip(0).t().unsqueeze(1).to(weight.dtype)
        return grad_x, grad_weight, grad_bias, grad_initial, None


def _gradients(given: Tensor, start: int, grad: Tensor, taps: Tensor, seen: Tensor | None, grad_taps: Tensor) -> Tensor:
    """The gradient of the rows ``given``, the first of which is row ``start``, in the type of ``taps``; what they add
    to those of the taps is added to ``grad_taps``.
    """
    wide = given.to(taps.dtype)
    found = torch.zeros_like(wide) if start < 0 else grad[:, start : start + given.shape[1]] * taps[0]
    for back, tap in enumerate(taps):
        first, last = max(start + back, 0), min(start + back + given.shape[1], grad.shape[1])
        if first >= last:
            continue
        upstream = grad[:, first:last].to(taps.dtype)
        if seen is not None and back:
            upstream = upstream * seen[back - 1][:, first:last]
        own = slice(first - start - back, last - start - back)
        if back or start < 0:
            found[:, own].addcmul_(upstream, tap)
        grad_taps[back] += (upstream * wide[:, own]).sum((0, 1))
    return found


def _taps(weight: Tensor) -> Tensor:
    """``weight`` [c, 1, k] as [k, c], that of a token's own row first, in fp32 or wider."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return weight.squeeze(1).t().flip(0).to(wide).contiguous()


def _blocks(x: Tensor, start: int) -> Iterator[slice]:
    """Rows of ``x`` from ``start`` on, so many at a time that they stay in a CPU's cache."""
    length = x.shape[1]
    size = max(_ELEMENTS * length // max(x.numel(), 1), 16) if x.device.type == "cpu" else length
    for first in range(start, length, size):
        yield slice(first, min(first + size, length))
