"""The positions of a sequence that each context-parallel rank holds, such that all have equal work in causal attention.

The sequence is divided into 2·cp equal pieces; rank *r* holds piece *r* and piece 2·cp - 1 - *r*. Early queries see few
keys and late ones many, and every rank has equally many of both.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sequence_slices(length: int, rank: int, ranks: int) -> tuple[slice, ...]:
    """The runs of positions that ``rank`` holds of ``length``, in order; one run for a single rank."""
    if ranks == 1:
        return (slice(0, length),)
    assert length % (2 * ranks) == 0, f"a length of {length} is not divisible by 2 x {ranks}"
    size = length // (2 * ranks)
    return tuple(slice(piece * size, (piece + 1) * size) for piece in (rank, 2 * ranks - 1 - rank))


def take(x: Tensor, rank: int, ranks: int, *, dim: int) -> Tensor:
    """The part of ``x`` along ``dim`` that ``rank`` holds."""
    if ranks == 1:
        return x
    runs = sequence_slices(x.shape[dim], rank, ranks)
    return torch.cat([x.narrow(dim, run.start, run.stop - run.start) for run in runs], dim=dim)


def positions(length: int, rank: int, ranks: int, *, device: torch.device | str = "cpu") -> Tensor:
    """The positions that ``rank`` holds of ``length``, ascending, [length / ranks]."""
    return take(torch.arange(length, device=device), rank, ranks, dim=0)


def in_order(parts: Tensor) -> Tensor:
    """The ranks' parts [ranks, s, …] as one sequence [ranks·s, …]: the inverse of ``by_rank``."""
    ranks = parts.shape[0]
    if ranks == 1:
        return parts[0]
    early, late = parts.chunk(2, dim=1)
    return torch.cat([early, late.flip(0)]).flatten(0, 1)


def by_rank(x: Tensor, ranks: int) -> Tensor:
    """A sequence [S, …] as the ranks' parts of it, [ranks, S / ranks, …]."""
    if ranks == 1:
        return x.unsqueeze(0)
    early, late = x.view(2, ranks, -1, *x.shape[1:])
    return torch.cat([early, late.flip(0)], dim=1)
