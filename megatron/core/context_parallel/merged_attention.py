"""Attention of this rank's queries to the keys of all ranks, one rank's keys after the other, in constant memory.

Forward merges partial results by online softmax. Backward visits every rank's keys again: each call needs only the
merged result and the merged log-sum-exp, and dropout draws the same masks again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.context_parallel.key_exchange import KeyExchange
from megatron.core.context_parallel.slicing import positions, take
from megatron.core.context_parallel.visible import Documents, Visible, visible, visible_pieces
from megatron.core.ops.attention.online_softmax import OnlineSoftmax, sinks_gradient, with_sinks
from megatron.core.ops.attention.partial import partial_attention, partial_attention_gradients
from megatron.core.ops.attention.request import AttentionOptions, PartialResult
from megatron.core.ops.dropout import generator_at, generator_state


@dataclass(frozen=True)
class _Call:
    """What all parts have in common. ``options`` are for the whole sequence, except a bias, for the rank's queries."""

    exchange: KeyExchange
    options: AttentionOptions
    backend: str
    documents: Documents | None

    def with_options(self, **changes: Any) -> _Call:
        """The same call with other options."""
        return dataclasses.replace(self, options=dataclasses.replace(self.options, **changes))

    def parts(self, owner: int, q: Tensor, k: Tensor) -> Iterator[tuple[Visible, AttentionOptions]]:
        """The calls that this rank's queries make to the keys ``k`` of ``owner``."""
        team = self.exchange.team
        lengths: dict[str, int] = {"queries": q.shape[0], "keys": k.shape[0]}
        causal, window = self.options.causal, self.options.window
        if window is None and self.options.slopes is None:
            cut = [visible(team.rank, owner, **lengths, causal=causal)]
        else:
            cut = visible_pieces(team.rank, owner, team.size, **lengths, causal=causal, window=window)
        if self.documents is not None:
            cut = [part for whole in cut for part in self.documents.cut(whole, team.rank, owner, team.size)]
        padding = self.options.attention_mask
        held = None if padding is None else take(padding, owner, team.size, dim=1)
        bias = None if self.options.bias is None else take(self.options.bias, owner, team.size, dim=2)
        for part in cut:
            mask = None if held is None else held[part.samples, part.keys]
            added = None if bias is None else bias[:, part.rows, part.keys]
            yield (
                part,
                dataclasses.replace(
                    self.options, causal=part.causal, offset=part.offset, attention_mask=mask, bias=added
                ),
            )


def merged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    exchange: KeyExchange,
    options: AttentionOptions,
    backend: str,
    documents: Documents | None,
) -> Tensor:
    """Attention over the sequence that the team holds in slices: ``q`` [s, b, n, d], ``k`` and ``v`` [s, b, g, d].

    ``options.attention_mask`` and ``documents`` are those of the whole sequence. Returns [s, b, n·d].
    """
    call = _Call(exchange, dataclasses.replace(options, document_ids=None, sinks=None), backend, documents)
    out: Tensor = _MergedAttention.apply(q, k, v, options.bias, options.sinks, call)  # type: ignore[no-untyped-call]
    return out.flatten(2)


class _MergedAttention(torch.autograd.Function):
    """Keeps q, k, v, the bias, the sinks, the result, its log-sum-exp, and the state of the generator."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, call: _Call
    ) -> Tensor:
        ctx.generator_state = generator_state(call.options.dropout, call.options.generator)
        merged = OnlineSoftmax.over_nothing(q, v)
        for owner, packed in call.exchange.visit(_pack(k, v)):
            keys, values = _unpack(packed, k, v)
            for part, options in call.parts(owner, q, keys):
                asked, at = (part.rows, part.samples), (part.keys, part.samples)
                found = partial_attention(q[asked], keys[at], values[at], options, backend=call.backend)
                merged.of(*asked).add(found)
        whole = merged.result(q.dtype)
        if sinks is not None:
            whole = with_sinks(whole, sinks)
        ctx.save_for_backward(q, k, v, whole.out, whole.lse, bias, sinks)
        ctx.call = call.with_options(bias=None, generator=None)
        return whole.out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, bias, sinks = ctx.saved_tensors
        call: _Call = ctx.call.with_options(bias=bias, generator=generator_at(ctx.generator_state, q.device))
        grad_q = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        grad_bias = None if bias is None else torch.zeros(bias.shape, dtype=lse.dtype, device=q.device)

        def contributions() -> Iterator[tuple[int, Tensor]]:
            """Gradients of each rank's packed keys and values; those of the queries and the bias are added up here."""
            for owner, packed in call.exchange.visit(_pack(k, v)):
                keys, values = _unpack(packed, k, v)
                contribution = torch.zeros_like(packed)
                grad_keys, grad_values = _unpack(contribution, k, v)
                for part, options in call.parts(owner, q, keys):
                    asked, at = (part.rows, part.samples), (part.keys, part.samples)
                    whole = PartialResult(out[asked], lse[asked])
                    found = partial_attention_gradients(
                        grad[asked], q[asked], keys[at], values[at], whole, options, backend=call.backend
                    )
                    grad_q[asked] += found.q
                    grad_keys[at] += found.k
                    grad_values[at] += found.v
                    if grad_bias is not None and found.bias is not None:
                        columns = positions(bias.shape[2], owner, call.exchange.team.size, device=q.device)[part.keys]
                        grad_bias[:, part.rows].index_add_(2, columns, found.bias.to(grad_bias.dtype))
                yield owner, contribution

        grad_k, grad_v = _unpack(call.exchange.sum_at_owner(contributions()), k, v)
        grad_sinks = sinks_gradient(grad, PartialResult(out, lse), sinks) if ctx.needs_input_grad[4] else None
        grad_bias = None if grad_bias is None else grad_bias.to(q.dtype)
        return grad_q.to(q.dtype), grad_k, grad_v, grad_bias, grad_sinks, None


def _pack(k: Tensor, v: Tensor) -> Tensor:
    """Both in one piece, to travel as one message."""
    return torch.cat([k.reshape(-1), v.reshape(-1)])


def _unpack(packed: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Views of the two, shaped like ``k`` and ``v``."""
    return packed[: k.numel()].view(k.shape), packed[k.numel() :].view(v.shape)
