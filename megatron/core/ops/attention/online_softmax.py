"""Attention over the keys seen so far, to which attention over others is added.

A softmax over all keys is a mean of softmaxes over parts, weighted by the parts' sums of exponentials (Milakov and
Gimelshein 2018, arXiv:1805.02867).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.ops.attention.request import PartialResult


@dataclass(frozen=True)
class OnlineSoftmax:
    """Attention over the keys seen so far; ``out`` [s, b, n, d] and ``lse`` [s, b, n] in fp32 or fp64."""

    out: Tensor
    lse: Tensor

    @classmethod
    def over_nothing(cls, q: Tensor, v: Tensor) -> OnlineSoftmax:
        """The state before any key has been seen by the queries ``q`` [s, b, n, d]."""
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros(*q.shape[:3], v.shape[3], dtype=wide, device=q.device)
        return cls(out, torch.full_like(out[..., 0], -torch.inf))

    @classmethod
    def uninitialized(cls, q: Tensor, v: Tensor) -> OnlineSoftmax:
        """The state for the queries ``q`` with arbitrary numbers: the first result is written to it."""
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.empty(*q.shape[:3], v.shape[3], dtype=wide, device=q.device)
        return cls(out, torch.empty_like(out[..., 0]))

    def of(self, rows: slice, samples: slice) -> OnlineSoftmax:
        """The part for the queries ``rows`` of ``samples``, in place."""
        return OnlineSoftmax(self.out[rows, samples], self.lse[rows, samples])

    def add(self, part: PartialResult) -> None:
        """Take in what all queries get from keys not seen before."""
        out, lse = self.out, self.lse
        together = torch.logaddexp(lse, part.lse)
        reference = together.clamp(min=torch.finfo(together.dtype).min)  # queries without keys: -inf - -inf is NaN
        out.mul_((lse - reference).exp_().unsqueeze(-1))
        out.addcmul_(part.out.to(out.dtype), (part.lse - reference).exp_().unsqueeze(-1))
        lse.copy_(together)

    def result(self, dtype: torch.dtype) -> PartialResult:
        """Attention over all keys that were added."""
        return PartialResult(self.out.to(dtype), self.lse)


def with_sinks(whole: PartialResult, sinks: Tensor) -> PartialResult:
    """Attention over all keys and the ``sinks`` [n], of attention over all keys."""
    lse = torch.logaddexp(whole.lse, sinks.to(whole.lse.dtype))
    return PartialResult(whole.out * (whole.lse - lse).exp_().unsqueeze(-1).to(whole.out.dtype), lse)


def sinks_gradient(grad: Tensor, whole: PartialResult, sinks: Tensor) -> Tensor:
    """Gradient of the ``sinks`` [n], for ``grad`` [sq, b, n, d] of ``whole``, which includes them.

    Of p = exp(sink - lse):  dsink = -Σ p·(dout·out), since the value is zero.
    """
    wide = whole.lse.dtype
    means = (grad.to(wide) * whole.out.to(wide)).sum(-1)
    return (sinks.to(wide) - whole.lse).exp_().mul_(means).sum((0, 1)).neg_().to(sinks.dtype)
