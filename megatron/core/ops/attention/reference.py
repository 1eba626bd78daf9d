"""Attention with explicit scores: slow, memory quadratic in length, obviously right. Supports everything."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.ops.attention.masks import allowed_keys
from megatron.core.ops.attention.request import AttentionOptions, AttentionRequest
from megatron.core.ops.dropout import dropout


def supports(request: AttentionRequest) -> str | None:
    """Every request."""
    return None


def attend(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
    """softmax(q·kᵀ·scale)·v with what may not be attended left out; see ``attention`` for shapes."""
    repeats = q.shape[2] // k.shape[2]  # query heads per key head
    query = q.permute(1, 2, 0, 3)  # [b, n, sq, d]
    key = k.repeat_interleave(repeats, dim=2).permute(1, 2, 3, 0)  # [b, n, d, sk]
    value = v.repeat_interleave(repeats, dim=2).permute(1, 2, 0, 3)  # [b, n, sk, d]
    wide = torch.promote_types(query.dtype, torch.float32) if options.softmax_in_fp32 else query.dtype
    scores = torch.matmul(query.to(wide) * options.scale, key.to(wide))  # [b, n, sq, sk]
    allowed = allowed_keys(q, k, options)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    probabilities = scores.softmax(dim=-1).to(v.dtype)
    if options.padding_mask is not None and allowed is not None:
        probabilities = probabilities.masked_fill(~allowed, 0.0)  # a query that sees no key gets zeros, not an average
    if options.dropout > 0.0:
        assert options.generator is not None, "attention dropout needs a generator"
        probabilities = dropout(probabilities, options.dropout, options.generator)
    return torch.matmul(probabilities, value).permute(2, 0, 1, 3).flatten(2)
