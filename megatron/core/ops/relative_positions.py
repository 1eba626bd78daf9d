"""Buckets of distances between two positions: one for each short distance, shared by long ones (arXiv:1910.10683)."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def relative_buckets(
    query_positions: Tensor, key_positions: Tensor, *, buckets: int, max_distance: int, bidirectional: bool
) -> Tensor:
    """The bucket of every pair, [queries, keys] in 0 … ``buckets`` - 1, for positions [queries] and [keys].

    With ``bidirectional`` the first half is for keys at or before the query and the other half for later ones; without,
    all are for earlier ones, and later keys count as at distance 0. Half of these buckets hold one distance each, the
    others ranges that grow geometrically up to ``max_distance``; the last one also holds larger distances.
    """
    ahead = key_positions.unsqueeze(0) - query_positions.unsqueeze(1)
    if not bidirectional:
        return _of_distance((-ahead).clamp(min=0), buckets, max_distance)
    half = buckets // 2
    return _of_distance(ahead.abs(), half, max_distance) + half * (ahead > 0)


def _of_distance(distance: Tensor, buckets: int, max_distance: int) -> Tensor:
    """Bucket of distances of 0 or more, looked up in a table of all up to ``max_distance``."""
    exact = buckets // 2
    known = torch.arange(max_distance + 1, device=distance.device)
    # In fp32 and in this order, as other implementations: a distance at a bucket's edge must fall into the same bucket.
    share = torch.log(known.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    table = torch.where(known < exact, known, (exact + (share * (buckets - exact)).long()).clamp(max=buckets - 1))
    return table[distance.clamp(max=max_distance)]
