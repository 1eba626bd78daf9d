"""Attention with sinks: one more key for each head, whose score is learned and whose value is zero (arXiv:2309.17453).

A sink only adds to the sum of the softmax, so it is attention over the other keys, scaled by the log-sum-exp. Its score
is computed once, by whatever backend has partial calls.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from megatron.core.ops.attention.masks import each_document
from megatron.core.ops.attention.online_softmax import sinks_gradient, with_sinks
from megatron.core.ops.attention.partial import partial_attention, partial_attention_gradients
from megatron.core.ops.attention.request import AttentionOptions, PartialResult
from megatron.core.ops.dropout import generator_at, generator_state


def attention_with_sinks(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, *, backend: str) -> Tensor:
    """``attention`` with ``options.sinks``, by the partial calls of ``backend``."""
    alone = dataclasses.replace(options, document_ids=None, sinks=None)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = _Sinks.apply(q, k, v, options.bias, options.sinks, alone, backend)  # type: ignore[no-untyped-call]
        return out.flatten(2)

    return call(q, k, v) if options.document_ids is None else each_document(call, q, k, v, options.document_ids)


class _Sinks(torch.autograd.Function):
    """Keeps the inputs, the result, its log-sum-exp, and the state of the generator."""

    @staticmethod
    @override
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sinks: Tensor,
        options: AttentionOptions,
        backend: str,
    ) -> Tensor:
        ctx.generator_state = generator_state(options.dropout, options.generator)
        whole = with_sinks(partial_attention(q, k, v, options, backend=backend), sinks)
        ctx.save_for_backward(q, k, v, bias, sinks, whole.out, whole.lse)
        ctx.call = dataclasses.replace(options, bias=None, generator=None), backend
        return whole.out

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, sinks, out, lse = ctx.saved_tensors
        options, backend = ctx.call
        generator = generator_at(ctx.generator_state, q.device)
        options = dataclasses.replace(options, bias=bias, generator=generator)
        whole = PartialResult(out, lse)
        found = partial_attention_gradients(grad, q, k, v, whole, options, backend=backend)
        grad_sinks = sinks_gradient(grad, whole, sinks) if ctx.needs_input_grad[4] else None
        return found.q, found.k, found.v, found.bias, grad_sinks, None, None
