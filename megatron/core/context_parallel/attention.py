"""Attention whose sequence context-parallel ranks hold in slices: the one entry that layers call.

=========== =============================================================== ===========================================
type        what travels, forward                                           asks for
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

from torch import Tensor

from megatron.config.parallel import CpCommType, head_exchange_size
from megatron.core.context_parallel.head_exchange import with_heads_split
from megatron.core.context_parallel.key_exchange import Gather, KeyExchange, Ring
from megatron.core.context_parallel.merged_attention import merged_attention
from megatron.core.context_parallel.visible import Documents
from megatron.core.ops.attention import AttentionOptions, AttentionRequest
from megatron.core.ops.attention import attention as attention_of_one_rank
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.exchange import Team


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: AttentionOptions,
    *,
    context: ParallelContext,
    comm_type: CpCommType,
    documents: Documents | None = None,
    backend: str = "auto",
) -> Tensor:
    """``ops.attention`` of queries and keys that each context-parallel rank holds a slice of (see ``slicing``).

    Shapes are those of the slices: ``q`` [s, b, n, d], ``k`` and ``v`` [s, b, g, d] -> [s, b, n·d]. Of the options,
    ``document_ids`` and ``attention_mask`` [b, S] are of the whole sequence, and ``bias`` [n, s, S] has all keys in
    order; with it ranks can't exchange heads. Causal attention has as many queries as keys. One rank: a plain call.
    ``documents``: those of ``document_ids``, where a caller of many layers has found them already.
    """

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_of_one_rank(q, k, v, options, backend=backend)

    everyone = Team.of(context.mesh, "cp")
    if everyone.size == 1:
        return plain(q, k, v)
    assert options.bias is None or "a2a" not in comm_type, "a bias has no rows for queries of other ranks"
    if comm_type == "a2a":
        return with_heads_split(plain, q, k, v, everyone)
    neighbours = everyone.neighbours(heads_split_over(comm_type, context))
    exchange = _key_exchange(comm_type, context)
    if options.document_ids is not None and documents is None:
        documents = Documents(options.document_ids)
    merged = functools.partial(
        merged_attention, exchange=exchange, options=options, backend=backend, documents=documents
    )
    return with_heads_split(plain if exchange.team.size == 1 else merged, q, k, v, neighbours)


def _key_exchange(comm_type: CpCommType, context: ParallelContext) -> KeyExchange:
    if comm_type == "all_gather":
        return Gather(context.mesh)
    return Ring(Team.of(context.mesh, "cp").counterparts(heads_split_over(comm_type, context)))


def heads_split_over(comm_type: CpCommType, context: ParallelContext) -> int:
    """Context-parallel ranks that exchange slices of the sequence for slices of the heads."""
    return head_exchange_size(comm_type, context.mesh.size("cp"), context.cp_sizes)


def actual_request(request: AttentionRequest, comm_type: CpCommType, context: ParallelContext) -> AttentionRequest:
    """What a backend is asked for when a layer asks for ``request`` over the whole sequence."""
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
