"""Which calls of attention make up what one rank's queries see of another rank's keys. Pure.

A rank holds an early and a late piece. Of the pieces of a rank before it, its queries see the early one; of those of a
rank after it, its late queries see both; and among its own, each query sees what comes before it. So every pair of
ranks is one call without a mask or with the plain causal one, and every such call but the causal is half a square.
Documents only make calls smaller: one for each document that both sides hold part of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron.core.context_parallel.slicing import take

ALL = slice(None)


@dataclass(frozen=True)
class Visible:
    """A rectangle, or with ``causal`` a triangle, of queries (``rows``) and the ``keys`` they see, in local positions.

    ``samples``: of the microbatch; all of them where documents don't make them differ.
    """

    rows: slice
    keys: slice
    causal: bool
    samples: slice = field(default_factory=lambda: ALL)


def visible(asker: int, owner: int, *, queries: int, keys: int, causal: bool) -> Visible:
    """What the ``queries`` that rank ``asker`` holds see of the ``keys`` that rank ``owner`` holds."""
    if not causal or asker == owner:
        return Visible(slice(0, queries), slice(0, keys), causal)
    if owner < asker:
        return Visible(slice(0, queries), slice(0, keys // 2), causal=False)
    return Visible(slice(queries // 2, queries), slice(0, keys), causal=False)


class Documents:
    """Where each document lies among the positions that each rank holds, from ``segments`` [b, S].

    A document is a run of equal numbers. What a rank holds of one is a run, too: a document in both of its pieces
    holds all that lies between them.
    """

    def __init__(self, segments: Tensor, ranks: int) -> None:
        changes = (segments[:, 1:] != segments[:, :-1]).cumsum(1)
        numbers = torch.cat([torch.zeros_like(changes[:, :1]), changes], dim=1)
        self._runs = [[_runs(sample) for sample in take(numbers, rank, ranks, dim=1).tolist()] for rank in range(ranks)]

    def cut(self, whole: Visible, asker: int, owner: int) -> list[Visible]:
        """``whole`` as what it holds of every document, sample by sample."""
        found = []
        for sample, (asking, owned) in enumerate(zip(self._runs[asker], self._runs[owner])):
            for document in asking.keys() & owned.keys():
                rows, keys = _overlap(asking[document], whole.rows), _overlap(owned[document], whole.keys)
                if rows is not None and keys is not None:
                    found.append(Visible(rows, keys, whole.causal, slice(sample, sample + 1)))
        return sorted(found, key=lambda part: (part.samples.start, part.rows.start))


def _runs(numbers: Sequence[int]) -> dict[int, slice]:
    """Of each number of an ascending list, where it stands."""
    found: dict[int, slice] = {}
    for at, number in enumerate(numbers):
        found[number] = slice(found[number].start if number in found else at, at + 1)
    return found


def _overlap(one: slice, other: slice) -> slice | None:
    start, stop = max(one.start, other.start), min(one.stop, other.stop)
    return slice(start, stop) if start < stop else None
