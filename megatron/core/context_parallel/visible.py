"""The calls of attention of one rank's queries to another rank's keys. Pure.

A rank holds an early and a late piece of the sequence. Its queries see the early piece of a rank before it; its late
queries see both pieces of a rank after it; of its own keys each query sees the earlier ones. So a pair of ranks is one
call, without a mask or with the plain causal one, and every call without a mask is half a square.
Documents make calls smaller: one for each document of which both ranks hold a part. Windows and ALiBi ask how far keys
are from queries, so each pair of pieces is a call of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from torch import Tensor

from megatron.core.context_parallel.slicing import sequence_slices
from megatron.core.ops.attention.masks import document_lengths

ALL = slice(None)


@dataclass(frozen=True)
class Visible:
    """A rectangle, or with ``causal`` a triangle, of queries (``rows``) and the ``keys`` they see, in local positions.

    ``samples``: of the microbatch; all of them without documents. ``offset``: position of the first query, counted from
    the first key, where it matters.
    """

    rows: slice
    keys: slice
    causal: bool
    samples: slice = field(default_factory=lambda: ALL)
    offset: int | None = None

    def within(self, rows: slice, keys: slice, samples: slice) -> Visible:
        """The part of it for these queries and keys."""
        offset = self.offset
        if offset is not None:
            offset += rows.start - self.rows.start - (keys.start - self.keys.start)
        return Visible(rows, keys, self.causal, samples, offset)


def visible(asker: int, owner: int, *, queries: int, keys: int, causal: bool) -> Visible:
    """What the ``queries`` that rank ``asker`` holds see of the ``keys`` that rank ``owner`` holds."""
    if not causal or asker == owner:
        return Visible(slice(0, queries), slice(0, keys), causal)
    if owner < asker:
        return Visible(slice(0, queries), slice(0, keys // 2), causal=False)
    return Visible(slice(queries // 2, queries), slice(0, keys), causal=False)


def visible_pieces(
    asker: int, owner: int, ranks: int, *, queries: int, keys: int, causal: bool, window: tuple[int, int] | None
) -> list[Visible]:
    """What a rank's queries see of another's keys, one entry for each pair of pieces with a visible key, with their
    distances.
    """
    found = []
    own, others = _pieces(queries, asker, ranks), _pieces(keys, owner, ranks)
    before, after = window or (keys * ranks, keys * ranks)
    for rows, asking in own:
        for columns, owned in others:
            nearest_before, nearest_after = asking.start - owned.stop + 1, owned.start - asking.stop + 1
            if nearest_before <= before and nearest_after <= (0 if causal else after):
                offset = asking.start - owned.start
                found.append(Visible(rows, columns, causal and offset == 0, offset=offset))
    return found


def _pieces(held: int, rank: int, ranks: int) -> list[tuple[slice, slice]]:
    """The rank's pieces: its own positions of each, and those in the whole sequence."""
    pieces, start = [], 0
    for piece in sequence_slices(held * ranks, rank, ranks):
        stop = start + piece.stop - piece.start
        pieces.append((slice(start, stop), piece))
        start = stop
    return pieces


class Documents:
    """Positions of each document, a run of equal numbers in ``document_ids`` [b, S]. Computed once for all layers.

    A rank's part of a document is a run of its local positions: a document in both of its pieces includes all between.
    """

    def __init__(self, document_ids: Tensor) -> None:
        self._length = document_ids.shape[1]
        ends = [[*accumulate(lengths, initial=0)] for lengths in document_lengths(document_ids)]
        self._spans = [[slice(*each) for each in pairwise(sample)] for sample in ends]
        self._held: dict[tuple[int, int], list[dict[int, slice]]] = {}

    def cut(self, whole: Visible, asker: int, owner: int, ranks: int) -> list[Visible]:
        """The parts of ``whole`` within each document, sample by sample."""
        found = []
        for sample, (asking, owned) in enumerate(zip(self.held(asker, ranks), self.held(owner, ranks))):
            for document in (each for each in asking if each in owned):
                rows, keys = _overlap(asking[document], whole.rows), _overlap(owned[document], whole.keys)
                if rows is not None and keys is not None:
                    found.append(whole.within(rows, keys, slice(sample, sample + 1)))
        return found

    def held(self, rank: int, ranks: int) -> list[dict[int, slice]]:
        """The documents of each sample of which ``rank`` of ``ranks`` holds a part, with its local positions."""
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
