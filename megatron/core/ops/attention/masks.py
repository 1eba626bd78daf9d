"""Which keys a query may attend to, and what distances take from scores (ALiBi).

The keys are a boolean tensor or, for packed documents, one call for each document.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import groupby

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from megatron.core.ops.attention.request import AttentionOptions

# Document lengths by the tensor of document numbers. All layers of a microbatch share that tensor, so on a GPU only
# the first layer waits for the device.
_known_lengths = WeakIdKeyDictionary()


def allowed_keys(q: Tensor, k: Tensor, options: AttentionOptions) -> Tensor | None:
    """True where a query may see a key, broadcastable to [b, n, sq, sk]; None when every query sees every key."""
    queries, keys = q.shape[0], k.shape[0]
    allowed: Tensor | None = None
    if options.window is not None or (options.causal and (queries > 1 or options.offset is not None)):
        ahead = distances(queries, keys, options.offset, device=q.device)
        before, after = options.sides
        allowed = torch.ones_like(ahead, dtype=torch.bool) if before is None else ahead >= -before
        if options.ahead is not None:
            allowed = allowed & (ahead <= options.ahead[:, None, :, None])
        else:
            allowed &= True if after is None else ahead <= after
    if options.document_ids is not None:
        same = (options.document_ids.unsqueeze(2) == options.document_ids.unsqueeze(1)).unsqueeze(1)  # [b, 1, s, s]
        allowed = same if allowed is None else allowed & same
    if options.attention_mask is not None:
        real = options.attention_mask.unsqueeze(1).unsqueeze(1)  # [b, 1, 1, sk]
        allowed = real if allowed is None else allowed & real
    return allowed


def distances(queries: int, keys: int, offset: int | None, *, device: torch.device) -> Tensor:
    """How far each key is ahead of each query, [sq, sk]; ``offset`` as in ``AttentionOptions``."""
    first = keys - queries if offset is None else offset
    return torch.arange(keys, device=device) - torch.arange(first, first + queries, device=device).unsqueeze(1)


def alibi_slopes(heads: int) -> Tensor:
    """ALiBi (arXiv:2108.12409): how much a score loses for each position between query and key, [heads] in fp64.

    For a power of two n the slopes are 2^(-8/n), 2^(-16/n), …; the heads beyond the largest power of two have every
    second slope of twice as many heads.
    """
    power = 2 ** int(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (head + 1) / power) for head in range(power)]
    slopes += [2.0 ** (-4.0 * (2 * head + 1) / power) for head in range(heads - power)]
    return torch.tensor(slopes, dtype=torch.float64)


def alibi(slopes: Tensor, ahead: Tensor, dtype: torch.dtype) -> Tensor:
    """What ``slopes`` [n] take from the scores of keys ``ahead`` [rows, keys] of their queries, [n, rows, keys]."""
    wide = torch.promote_types(dtype, torch.float32)
    return (ahead.abs().to(wide).neg() * slopes.to(wide)[:, None, None]).to(dtype)


def each_document(
    call: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor
) -> Tensor:
    """``call`` on q, k, v of each document, results concatenated: cheaper than one masked call. A document is a run of
    equal numbers in ``document_ids`` [b, s].
    """
    assert q.shape[0] == k.shape[0], "documents need equally long queries and keys"
    samples = []
    for sample, lengths in enumerate(document_lengths(document_ids)):
        parts = (torch.split(x[:, sample : sample + 1], lengths) for x in (q, k, v))
        samples.append(torch.cat([call(*part) for part in zip(*parts)]))
    return torch.cat(samples, dim=1)


def document_lengths(document_ids: Tensor) -> list[list[int]]:
    """Tokens of each document of each sample of ``document_ids`` [b, s]; waits for a GPU once for all layers."""
    known: list[list[int]] | None = _known_lengths.get(document_ids)  # type: ignore[no-untyped-call]
    if known is None:
        known = [[len(list(run)) for _, run in groupby(row)] for row in document_ids.tolist()]
        _known_lengths[document_ids] = known
    return known
