"""Attention over a sequence that context-parallel ranks hold in slices: the function that layers call.

=========== =============================================================== ===========================================
type        what is sent in the forward pass                                needs
=========== =============================================================== ===========================================
p2p         keys and values, from rank to rank while attention is computed  nothing
all_gather  keys and values, at once                                        memory for those of the whole sequence
a2a         sequence slices for head slices, and back                       heads that divide
a2a+p2p     heads among neighbours, keys round rings of their counterparts  two sizes; heads that divide by the first
=========== =============================================================== ===========================================
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from megatron.config.parallel import CpCommType, head_exchange_size
from megatron.core.context_parallel.head_exchange import exchange
from megatron.core.context_parallel.key_exchange import Gather, KeyExchange, Ring
from megatron.core.context_parallel.merged_attention import Expand, merged_attention
from megatron.core.context_parallel.slicing import by_rank, in_order
from megatron.core.context_parallel.visible import Documents
from megatron.core.ops.attention import AttentionOptions, AttentionRequest, LayerBackend
from megatron.core.ops.attention import attention as attention_of_one_rank
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.exchange import RankGroup

KEYS_TRAVEL: tuple[CpCommType, ...] = ("p2p", "all_gather")
"""The types by which a rank gets the keys and values of all heads."""


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: AttentionOptions,
    *,
    context: ParallelContext,
    comm_type: CpCommType,
    documents: Documents | None = None,
    backend: str | LayerBackend = "auto",
    expand: Expand | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """``ops.attention`` of queries and keys that each context-parallel rank holds a slice of (see ``slicing``).

    Shapes are those of the slices: ``q`` [s, b, n, d], ``k`` and ``v`` [s, b, g, d] -> [s, b, n·d]. Of the options,
    ``document_ids`` and ``attention_mask`` [b, S] are of the whole sequence, and ``bias`` [n, s, S] has all keys in
    order; with it ranks can't exchange heads. ``sinks`` and ``slopes`` are those of all n heads. Causal attention has
    as many queries as keys. One rank: a plain call.
    ``documents``: those of ``document_ids``, if the caller has computed them for all layers.

    ``expand(weight, k, v)``: where keys would travel to other ranks, what is sent instead is ``k`` and ``v`` [s, b, …],
    from which each rank computes keys [s, b, g, d] and values.
    """

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_of_one_rank(q, k, v, options, backend=backend)

    everyone = RankGroup.of(context.mesh, "cp")
    assert expand is None or (everyone.size > 1 and comm_type in KEYS_TRAVEL), "only where keys would travel"
    if everyone.size == 1:
        return plain(q, k, v)
    assert options.bias is None or "a2a" not in comm_type, "a bias has no rows for queries of other ranks"
    size = heads_split_over(comm_type, context)
    neighbours, counterparts = everyone.neighbours(size), everyone.counterparts(size)
    options = _of_heads(options, neighbours)
    if counterparts.size == 1:
        return _with_heads_split(plain, q, k, v, neighbours)
    key_exchange: KeyExchange = Gather(everyone) if comm_type == "all_gather" else Ring(counterparts)
    merged = functools.partial(
        merged_attention,
        exchange=key_exchange,
        options=options,
        backend=backend,
        documents=documents or (None if options.document_ids is None else Documents(options.document_ids)),
        expand=expand,
        weight=weight,
    )
    return _with_heads_split(merged, q, k, v, neighbours)


def heads_split_over(comm_type: CpCommType, context: ParallelContext) -> int:
    """Context-parallel ranks that exchange slices of the sequence for slices of the heads."""
    return head_exchange_size(comm_type, context.mesh.size("cp"), context.cp_sizes)


def actual_request(request: AttentionRequest, comm_type: CpCommType, context: ParallelContext) -> AttentionRequest:
    """The request that a backend gets when a layer makes ``request`` for the whole sequence."""
    slices = 1 if context.mesh.size("cp") == 1 else context.mesh.size("cp") // heads_split_over(comm_type, context)
    if slices == 1:
        return request
    return dataclasses.replace(
        request,
        query_length=request.query_length // slices,
        key_length=request.key_length // slices,
        document_ids=False,
        partial=True,
    )


def _of_heads(options: AttentionOptions, peers: RankGroup) -> AttentionOptions:
    """The options of this rank's part of the heads."""

    def part(of_all: Tensor | None) -> Tensor | None:
        return None if of_all is None else of_all.chunk(peers.size)[peers.rank]

    return dataclasses.replace(options, sinks=part(options.sinks), slopes=part(options.slopes))


def _with_heads_split(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, peers: RankGroup
) -> Tensor:
    """``attend`` on all that the group holds of the sequence, for this rank's part of the heads (DeepSpeed-Ulysses,
    arXiv:2309.14509).

    ``q`` [s, b, n, d], ``k`` and ``v`` [s, b, g, d] -> [s, b, n·d]. n is divisible by the group's size. So is g, or the
    size by g: then each key and value head goes to several ranks, and its owner sums their gradients.
    """
    size = peers.size
    if size == 1:
        return attend(q, k, v)
    copies = size // k.shape[2] if k.shape[2] < size else 1
    whole = (q, k.repeat_interleave(copies, dim=2), v.repeat_interleave(copies, dim=2))
    parts = [
        x.reshape(*x.shape[:2], size, -1, x.shape[3]).permute(2, 0, 1, 3, 4) for x in whole
    ]  # [size, s, b, n/size, d]
    arrived = exchange(torch.cat([part.flatten(1) for part in parts], dim=1), peers)
    mine = torch.split(arrived, [part[0].numel() for part in parts], dim=1)
    out = attend(*(in_order(x.reshape(part.shape)) for x, part in zip(mine, parts)))  # [size·s, b, n/size·d]
    by_head = exchange(by_rank(out, size), peers)
    return by_head.permute(1, 2, 0, 3).flatten(2)
