"""Attention through torch's scaled_dot_product_attention: no score matrix is kept."""

from __future__ import annotations

import functools

import torch.nn.functional as F
from torch import Tensor

from megatron.core.ops.attention.documents import each_document
from megatron.core.ops.attention.masks import allowed_keys
from megatron.core.ops.attention.request import AttentionOptions, AttentionRequest


def supports(request: AttentionRequest) -> str | None:
    """Everything but dropout, which torch would draw from its global generator, so that no layer could be replayed."""
    if request.dropout > 0.0:
        return f"it draws dropout ({request.dropout}) from torch's global generator, which cannot be replayed"
    return None


def attend(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
    """See ``attention``. Without masks no tensor is copied: batch and heads are folded into one dim of heads."""
    if options.padding_mask is None and (q.shape[0] == k.shape[0] or not options.causal or q.shape[0] == 1):
        call = functools.partial(_folded, causal=options.causal and q.shape[0] > 1, scale=options.scale)
        return call(q, k, v) if options.segments is None else each_document(call, q, k, v, options.segments)
    query, key, value = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # [b, n, s, d]
    allowed = allowed_keys(q, k, options)
    grouped = q.shape[2] != k.shape[2]
    out = F.scaled_dot_product_attention(query, key, value, allowed, scale=options.scale, enable_gqa=grouped)
    if options.padding_mask is not None and allowed is not None:
        out = out.masked_fill(~allowed.any(dim=-1, keepdim=True), 0.0)  # a query that sees no key gets zeros
    return out.permute(2, 0, 1, 3).flatten(2)


def _folded(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """Samples don't interact and need no mask, so ``b`` samples of ``n`` heads are one sample of ``b·n`` heads.

    That keeps [s, b, n, d] as it lies in memory, on the way in and out.
    """
    query, key, value = (x.flatten(1, 2).transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, b·n, s, d]
    grouped = q.shape[2] != k.shape[2]
    out = F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale, enable_gqa=grouped)
    return out.squeeze(0).transpose(0, 1).reshape(q.shape[0], q.shape[1], -1)  # [s, b, n·d]
