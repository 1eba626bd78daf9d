"""Scaled dot-product attention: one function with interchangeable backends."""

from __future__ import annotations

from torch import Tensor

from megatron.core.ops.attention.registry import LayerBackend, choice_for, choose, takes_sinks
from megatron.core.ops.attention.request import AttentionOptions, AttentionRequest
from megatron.core.ops.attention.sinks import attention_with_sinks

__all__ = ["AttentionOptions", "AttentionRequest", "LayerBackend", "attention", "choose"]


def attention(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, *, backend: str | LayerBackend = "auto"
) -> Tensor:
    """softmax(q·kᵀ·scale + bias)·v for ``n`` query heads over ``g`` key and value heads, n a multiple of g; see
    ``AttentionOptions`` for what changes the scores.

    Shapes: ``q`` [sq, b, n, d], ``k`` [sk, b, g, d], ``v`` [sk, b, g, d] -> [sq, b, n·d]. Raises ConfigError when the
    ``backend`` asked for cannot serve the call. A ``LayerBackend`` is asked once for each kind of call.
    """
    chosen = choice_for(q, k, options, backend)
    if options.sinks is not None and not takes_sinks(chosen.name):
        return attention_with_sinks(q, k, v, options, backend=chosen.name)
    return chosen.backend.attend(q, k, v, options)
