"""Attention of this rank's queries to the keys of all ranks, one rank's keys after the other, in constant memory.

Forward merges partial results by online softmax. Backward visits every rank's keys again: each call needs only the
merged result and the merged log-sum-exp, and dropout draws the same masks again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from megatron.core.context_parallel.key_exchange import KeyExchange
from megatron.core.context_parallel.slicing import positions, take
from megatron.core.context_parallel.visible import Documents, Visible, visible, visible_pieces
from megatron.core.ops.attention.online_softmax import OnlineSoftmax, sinks_gradient, with_sinks
from megatron.core.ops.attention.partial import partial_attention, partial_attention_gradients
from megatron.core.ops.attention.registry import LayerBackend
from megatron.core.ops.attention.request import AttentionOptions, PartialResult
from megatron.core.ops.dropout import generator_at, generator_state

Expand = Callable[..., tuple[Tensor, Tensor]]
"""Keys [s, b, g, d] and values from narrower tensors, and from a weight."""


@dataclass(frozen=True)
class _Call:
    """What all parts have in common. ``options`` are for the whole sequence, except a bias, for the rank's queries.

    ``expand``: makes keys and values of what is sent; None: they are sent themselves.
    """

    exchange: KeyExchange
    options: AttentionOptions
    backend: str | LayerBackend
    documents: Documents | None
    expand: Expand | None = None

    def with_options(self, **changes: Any) -> _Call:
        """This call with some other options."""
        return dataclasses.replace(self, options=dataclasses.replace(self.options, **changes))

    def parts(self, owner: int, q: Tensor, k: Tensor) -> Iterator[tuple[Visible, AttentionOptions]]:
        """The calls that this rank's queries make to the keys ``k`` of ``owner``."""
        peers = self.exchange.peers
        lengths: dict[str, int] = {"queries": q.shape[0], "keys": k.shape[0]}
        causal, window = self.options.causal, self.options.window
        if window is None and self.options.slopes is None:
            cut = [visible(peers.rank, owner, **lengths, causal=causal)]
        else:
            cut = visible_pieces(peers.rank, owner, peers.size, **lengths, causal=causal, window=window)
        if self.documents is not None:
            cut = [part for whole in cut for part in self.documents.cut(whole, peers.rank, owner, peers.size)]
        padding = self.options.attention_mask
        held = None if padding is None else take(padding, owner, peers.size, dim=1)
        bias = None if self.options.bias is None else take(self.options.bias, owner, peers.size, dim=2)
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
    *sent: Tensor,
    exchange: KeyExchange,
    options: AttentionOptions,
    backend: str | LayerBackend,
    documents: Documents | None,
    expand: Expand | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """Attention over the sequence that the group holds in slices: ``q`` [s, b, n, d], ``sent``: keys and values
    [s, b, g, d]. ``options.attention_mask`` and ``documents`` are those of the whole sequence. Returns [s, b, n·d].

    With ``expand`` each rank computes keys and values from what it gets, ``expand(weight, *sent)``: tensors [s, b, …],
    narrower than keys and values. Kept are they and the queries. ``expand`` runs once for each rank's tensors in the
    forward pass and once in the backward pass, and draws no random numbers.
    """
    call = _Call(exchange, dataclasses.replace(options, document_ids=None, sinks=None), backend, documents, expand)
    out: Tensor = _MergedAttention.apply(q, options.bias, options.sinks, weight, call, *sent)  # type: ignore[no-untyped-call]
    return out.flatten(2)


class _MergedAttention(torch.autograd.Function):
    """Keeps q, what is sent, the bias, the sinks, the result, its log-sum-exp, and the state of the generator."""

    @staticmethod
    @override
    def forward(
        ctx: Any,
        q: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
        weight: Tensor | None,
        call: _Call,
        *sent: Tensor,
    ) -> Tensor:
        ctx.generator_state = generator_state(call.options.dropout, call.options.generator)
        merged: OnlineSoftmax | None = None
        for owner, packed in call.exchange.visit(_pack(sent)):
            keys, values = _expanded(call, weight, _unpack(packed, sent))
            merged = merged or OnlineSoftmax.over_nothing(q, values)
            for part, options in call.parts(owner, q, keys):
                asked, at = (part.rows, part.samples), (part.keys, part.samples)
                found = partial_attention(q[asked], keys[at], values[at], options, backend=call.backend)
                merged.of(*asked).add(found)
        assert merged is not None, "a rank visits its own keys first"
        whole = merged.result(q.dtype)
        if sinks is not None:
            whole = with_sinks(whole, sinks)
        ctx.save_for_backward(q, whole.out, whole.lse, bias, sinks, weight, *sent)
        ctx.call = call.with_options(bias=None, generator=None)
        return whole.out

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, out, lse, bias, sinks, weight, *sent = ctx.saved_tensors
        call: _Call = ctx.call.with_options(bias=bias, generator=generator_at(ctx.generator_state, q.device))
        grad_q = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        grad_bias = None if bias is None else torch.zeros(bias.shape, dtype=lse.dtype, device=q.device)
        needs_weight = weight is not None and ctx.needs_input_grad[3]
        grad_weight = torch.zeros(weight.shape, dtype=lse.dtype, device=q.device) if needs_weight else None

        def contributions() -> Iterator[tuple[int, Tensor]]:
            """Gradients of what each rank sent; those of the queries, the bias and the weight are added up here."""
            for owner, packed in call.exchange.visit(_pack(sent)):
                given = _Given.of(call, weight, _unpack(packed, sent))
                for part, options in call.parts(owner, q, given.keys):
                    asked, at = (part.rows, part.samples), (part.keys, part.samples)
                    whole = PartialResult(out[asked], lse[asked])
                    found = partial_attention_gradients(
                        grad[asked], q[asked], given.keys[at], given.values[at], whole, options, backend=call.backend
                    )
                    grad_q[asked] += found.q
                    given.grad_keys[at] += found.k
                    given.grad_values[at] += found.v
                    if grad_bias is not None and found.bias is not None:
                        columns = positions(bias.shape[2], owner, call.exchange.peers.size, device=q.device)[part.keys]
                        grad_bias[:, part.rows].index_add_(2, columns, found.bias.to(grad_bias.dtype))
                yield owner, given.gradients(grad_weight)

        grads = _unpack(call.exchange.sum_at_owner(contributions()), sent)
        grad_sinks = sinks_gradient(grad, PartialResult(out, lse), sinks) if ctx.needs_input_grad[2] else None
        grad_bias = None if grad_bias is None else grad_bias.to(q.dtype)
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_q.to(q.dtype), grad_bias, grad_sinks, grad_weight, None, *grads


@dataclass(frozen=True)
class _Given:
    """Keys and values of one rank, from ``sent``, and where their gradients are added up."""

    sent: tuple[Tensor, ...]
    weight: Tensor | None
    keys: Tensor
    values: Tensor
    grad_keys: Tensor
    grad_values: Tensor
    packed: Tensor | None

    @classmethod
    def of(cls, call: _Call, weight: Tensor | None, sent: tuple[Tensor, ...]) -> _Given:
        if call.expand is None:
            keys, values = sent
            packed = torch.zeros(keys.numel() + values.numel(), dtype=keys.dtype, device=keys.device)
            grad_keys, grad_values = _unpack(packed, sent)
            return cls(sent, None, keys, values, grad_keys, grad_values, packed)
        sent = tuple(each.detach().requires_grad_() for each in sent)
        weight = None if weight is None else weight.detach().requires_grad_()
        with torch.enable_grad():
            keys, values = _expanded(call, weight, sent)
        return cls(sent, weight, keys, values, torch.zeros_like(keys), torch.zeros_like(values), None)

    def gradients(self, grad_weight: Tensor | None) -> Tensor:
        """Packed, of what was sent; that of the weight is added to ``grad_weight``."""
        if self.packed is not None:
            return self.packed
        wanted = self.sent if grad_weight is None or self.weight is None else (*self.sent, self.weight)
        found = torch.autograd.grad((self.keys, self.values), wanted, (self.grad_keys, self.grad_values))
        if grad_weight is not None:
            grad_weight += found[-1]
        return _pack(found[: len(self.sent)])


def _expanded(call: _Call, weight: Tensor | None, sent: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    if call.expand is not None:
        return call.expand(weight, *sent)
    keys, values = sent
    return keys, values


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    """All in one piece, to travel as one message."""
    return torch.cat([each.reshape(-1) for each in tensors])


def _unpack(packed: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Views of what was packed, shaped like the tensors ``like``."""
    parts = torch.split(packed, [each.numel() for each in like])
    return tuple(part.view(each.shape) for part, each in zip(parts, like))
