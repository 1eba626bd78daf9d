"""Which calls of attention make up what one rank's queries see of another rank's keys. Pure.

A rank holds an early and a late piece. Of the pieces of a rank before it, its queries see the early one; of those of a
rank after it, its late queries see both; and among its own, each query sees what comes before it. So every pair of
ranks is one call without a mask or with the plain causal one, and every such call but the causal is half a square.
Documents only make calls smaller: one for each document that both sides hold part of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from megatron.core.context_parallel.slicing import sequence_slices

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
    """Where each document lies: a run of equal numbers in ``document_ids`` [b, S]. Found once, for all layers.

    What a rank holds of a document is a run of its positions, too: one in both of its pieces fills all between them.
    """

    def __init__(self, document_ids: Tensor) -> None:
        samples, self._length = document_ids.shape
        starts: list[list[int]] = [[0] for _ in range(samples)]
        for sample, before in (document_ids[:, 1:] != document_ids[:, :-1]).nonzero().tolist():
            starts[sample].append(before + 1)
        self._spans = [[slice(*ends) for ends in zip(each, [*each[1:], self._length])] for each in starts]
        self._held: dict[tuple[int, int], list[dict[int, slice]]] = {}

    def cut(self, whole: Visible, asker: int, owner: int, ranks: int) -> list[Visible]:
        """``whole`` as what it holds of every document, sample by sample."""
        found = []
        for sample, (asking, owned) in enumerate(zip(self.held(asker, ranks), self.held(owner, ranks))):
            for document in asking:
                if document not in owned:
                    continue
                rows, keys = _overlap(asking[document], whole.rows), _overlap(owned[document], whole.keys)
                if rows is not None and keys is not None:
                    found.append(Visible(rows, keys, whole.causal, slice(sample, sample + 1)))
        return found

    def held(self, rank: int, ranks: int) -> list[dict[int, slice]]:
        """For each sample: the documents that ``rank`` of ``ranks`` holds part of, with where, in local positions."""
        if (rank, ranks) not in self._held:
            self._held[rank, ranks] = [self._held_of(spans, rank, ranks) for spans in self._spans]
        return self._held[rank, ranks]

    def _held_of(self, spans: Sequence[slice], rank: int, ranks: int) -> dict[int, slice]:
        found: dict[int, slice] = {}
        local = 0
        for piece in sequence_slices(self._length, rank, ranks):
            for number, span in enumerate(spans):
                part = _overlap(span, piece)
                if part is not None:
                    stop = part.stop - piece.start + local
                    start = found[number].start if number in found else part.start - piece.start + local
                    found[number] = slice(start, stop)
            local += piece.stop - piece.start
        return found


def _overlap(one: slice, other: slice) -> slice | None:
    start, stop = max(one.start, other.start), min(one.stop, other.stop)
    return slice(start, stop) if start < stop else None
