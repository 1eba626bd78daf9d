"""Attention over some of the keys, to be merged with attention over the others: what context parallelism is made of.

A softmax over all keys is a mean of softmaxes over parts, weighted by the parts' sums of exponentials (Milakov and
Gimelshein 2018, arXiv:1805.02867). Its gradient needs of the other parts only the merged result (Dao et al. 2022,
arXiv:2205.14135), so parts can be computed wherever their keys are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.ops.attention.registry import choose
from megatron.core.ops.attention.request import AttentionOptions, AttentionRequest, Gradients, PartialResult


def partial_attention(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, *, backend: str = "auto"
) -> PartialResult:
    """softmax(q·kᵀ·scale)·v over just these keys, without autograd; shapes as in ``attention``.

    Causal calls have as many queries as keys. The caller splits documents: ``options.document_ids`` is None.
    """
    request = AttentionRequest.of(q, k, options, partial=True)
    return choose(request, backend).backend.attend_partly(q, k, v, options)


def partial_attention_gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    whole: PartialResult,
    options: AttentionOptions,
    *,
    backend: str = "auto",
) -> Gradients:
    """What these keys contribute to the gradients, for ``grad`` [sq, b, n, d] of the result over *all* keys, ``whole``.

    ``options.generator`` must have the state that it had at the call of ``partial_attention`` that is differentiated.
    """
    request = AttentionRequest.of(q, k, options, partial=True)
    return choose(request, backend).backend.gradients_of_part(grad, q, k, v, whole, options)


@dataclass(frozen=True)
class OnlineSoftmax:
    """Attention over the keys seen so far; ``out`` [s, b, n, d] and ``lse`` [s, b, n] in fp32 or fp64."""

    out: Tensor
    lse: Tensor

    @classmethod
    def over_nothing(cls, q: Tensor, v: Tensor) -> OnlineSoftmax:
        """Before any key has been seen by the queries ``q`` [s, b, n, d]."""
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros(*q.shape[:3], v.shape[3], dtype=wide, device=q.device)
        return cls(out, torch.full_like(out[..., 0], -torch.inf))

    def add(self, part: PartialResult, rows: slice, samples: slice) -> None:
        """Take in what the queries ``rows`` of ``samples`` get from keys not seen before."""
        out, lse = self.out[rows, samples], self.lse[rows, samples]
        together = torch.logaddexp(lse, part.lse)
        reference = together.clamp(min=torch.finfo(together.dtype).min)  # queries without keys: -inf - -inf is NaN
        out.mul_((lse - reference).exp_().unsqueeze(-1))
        out.addcmul_(part.out.to(out.dtype), (part.lse - reference).exp_().unsqueeze(-1))
        lse.copy_(together)

    def result(self, dtype: torch.dtype) -> PartialResult:
        """Attention over all keys that were added."""
        return PartialResult(self.out.to(dtype), self.lse)
