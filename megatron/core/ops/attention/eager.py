"""Attention with explicit scores: slow, memory quadratic in length, obviously right. Supports everything."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.ops.attention.masks import alibi, allowed_keys, distances
from megatron.core.ops.attention.request import AttentionOptions, AttentionRequest, Gradients, PartialResult
from megatron.core.ops.dropout import draw_kept, dropout, scale_kept


def supports(request: AttentionRequest) -> str | None:
    """None: it serves every request."""
    return None


def attend(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
    """softmax(q·kᵀ·scale + bias)·v with what may not be attended left out; see ``attention`` for shapes."""
    wide = torch.promote_types(q.dtype, torch.float32) if options.softmax_in_fp32 else q.dtype
    scores, _ = _scores(q, k, options, wide)
    allowed = allowed_keys(q, k, options)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    if options.sinks is not None:
        sinks = options.sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    probabilities = scores.softmax(dim=-1)[..., : k.shape[0]].to(v.dtype)
    if options.attention_mask is not None and allowed is not None:
        probabilities = probabilities.masked_fill(~allowed, 0.0)  # a query that sees no key gets zeros, not an average
    probabilities = dropout(probabilities, options.dropout, options.generator)
    return _by_position(torch.matmul(probabilities, _repeated(v, q))).flatten(2)


def attend_partly(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> PartialResult:
    """The result of ``partial_attention``, computed in fp32 or fp64."""
    scores, _ = _visible_scores(q, k, options)
    lse = scores.logsumexp(dim=-1)
    probabilities = _probabilities(scores, lse)
    probabilities = dropout(probabilities, options.dropout, options.generator)
    out = torch.matmul(probabilities, _repeated(v, q).to(scores.dtype))
    return PartialResult(_by_position(out).to(v.dtype), lse.permute(2, 0, 1))


def gradients_of_part(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: PartialResult, options: AttentionOptions
) -> Gradients:
    """The result of ``partial_attention_gradients``; the formulas are those of ``chunked``."""
    scores, steepness = _visible_scores(q, k, options)
    query, key, value = (_repeated(x, q).to(scores.dtype) for x in (q, k, v))
    upstream, out = (_by_head(x).to(scores.dtype) for x in (grad, whole.out))
    used = probabilities = _probabilities(scores, whole.lse.permute(1, 2, 0))
    grad_probabilities = torch.matmul(upstream, value.transpose(2, 3))
    if options.dropout > 0.0:
        kept = draw_kept(probabilities, options.dropout, options.generator)
        used = scale_kept(probabilities, kept, options.dropout)
        grad_probabilities = scale_kept(grad_probabilities, kept, options.dropout)
    grad_scores = probabilities * (grad_probabilities - (upstream * out).sum(-1, keepdim=True))
    grad_bias = None if options.bias is None else grad_scores.sum(0).to(options.bias.dtype)
    grad_scores = grad_scores * (options.scale * steepness)
    grad_q, grad_k = torch.matmul(grad_scores, key), torch.matmul(grad_scores.transpose(2, 3), query)
    grad_v = torch.matmul(used.transpose(2, 3), upstream)
    return Gradients(_by_position(grad_q).to(q.dtype), _summed(grad_k, k), _summed(grad_v, v), grad_bias)


def _by_head(x: Tensor) -> Tensor:
    """[s, b, n, d] -> [b, n, s, d]."""
    return x.permute(1, 2, 0, 3)


def _by_position(x: Tensor) -> Tensor:
    """[b, n, s, d] -> [s, b, n, d]."""
    return x.permute(2, 0, 1, 3)


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values [sk, b, g, d] -> [b, n, sk, d], each head repeated for the query heads of ``q`` that it serves."""
    return _by_head(x.repeat_interleave(q.shape[2] // x.shape[2], dim=2))


def _summed(grad: Tensor, x: Tensor) -> Tensor:
    """Gradient [b, n, sk, d] -> [sk, b, g, d]: summed over the query heads that each head of ``x`` serves."""
    length, batch, groups, width = x.shape
    return _by_position(grad).reshape(length, batch, groups, -1, width).sum(3).to(x.dtype)


def _scores(q: Tensor, k: Tensor, options: AttentionOptions, dtype: torch.dtype) -> tuple[Tensor, Tensor | float]:
    """[b, n, sq, sk], and the derivative of the soft cap."""
    scores = torch.matmul(_by_head(q).to(dtype) * options.scale, _repeated(k, q).to(dtype).transpose(2, 3))
    steepness: Tensor | float = 1.0
    if options.soft_cap is not None:
        bent = (scores / options.soft_cap).tanh()
        scores, steepness = bent * options.soft_cap, 1.0 - bent.square()
    if options.bias is not None:
        scores = scores + options.bias
    if options.slopes is not None:
        ahead = distances(q.shape[0], k.shape[0], options.offset, device=q.device)
        scores = scores + alibi(options.slopes, ahead, dtype)
    return scores, steepness


def _visible_scores(q: Tensor, k: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor | float]:
    """Scores [b, n, sq, sk] in fp32 or fp64, minus infinity where a query may not see a key, and the derivative of the
    soft cap.
    """
    scores, steepness = _scores(q, k, options, torch.promote_types(q.dtype, torch.float32))
    allowed = allowed_keys(q, k, options)
    return (scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)), steepness


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse); zeros for a query that sees no key."""
    return (scores - lse.clamp(min=torch.finfo(lse.dtype).min).unsqueeze(-1)).exp()
