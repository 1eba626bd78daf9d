"""Scaled dot-product attention behind one signature, with interchangeable backends."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron.core.ops.attention.registry import choose
from megatron.core.ops.attention.request import AttentionOptions, AttentionRequest

__all__ = ["AttentionRequest", "attention", "choose"]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    dropout: float = 0.0,
    generator: torch.Generator | None = None,
    segments: Tensor | None = None,
    padding_mask: Tensor | None = None,
    bias: Tensor | None = None,
    softmax_in_fp32: bool = False,
    backend: str = "auto",
) -> Tensor:
    """softmax(q·kᵀ·scale + bias)·v for ``n`` query heads over ``g`` key and value heads, n a multiple of g.

    Shapes: ``q`` [sq, b, n, d], ``k`` [sk, b, g, d], ``v`` [sk, b, g, d] -> [sq, b, n·d].
    ``causal``: a query sees keys up to its own position; the last query stands at the last key, so a cache may precede.
    ``scale``: 1 / sqrt(d) when None.  ``dropout``: on the probabilities, drawn from ``generator``.
    ``segments`` [b, s] int: document of each position; a query sees keys of its own document only. A document is
    one run of positions; queries and keys are the same positions.
    ``padding_mask`` [b, sk] bool: True for real keys; a query that sees no key gets zeros.
    ``bias`` [n, sq, sk]: added to the scores of every sample, in the type of ``q``; it may want a gradient.
    ``softmax_in_fp32``: for backends that would otherwise compute it in the type of ``q``.

    Raises ConfigError when the ``backend`` asked for cannot serve the call.
    """
    request = AttentionRequest(
        device=q.device,
        dtype=q.dtype,
        query_length=q.shape[0],
        key_length=k.shape[0],
        head_width=q.shape[-1],
        causal=causal,
        dropout=dropout,
        segments=segments is not None,
        padding_mask=padding_mask is not None,
        bias=bias is not None,
        softmax_in_fp32=softmax_in_fp32,
        needs_grad=q.requires_grad,
    )
    options = AttentionOptions(
        causal=causal,
        scale=1.0 / math.sqrt(q.shape[-1]) if scale is None else scale,
        dropout=dropout,
        generator=generator,
        segments=segments,
        padding_mask=padding_mask,
        bias=bias,
        softmax_in_fp32=softmax_in_fp32,
    )
    return choose(request, backend).backend.attend(q, k, v, options)
