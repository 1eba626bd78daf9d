"""Whole documents in samples: which ones lie together, as a pure function of their lengths and a seed.

A document of n tokens is n − 1 pairs of a token and its label, and no pair reaches into another document. Two ways to
fill samples of S pairs:

- padding-free: the documents' pairs follow each other and are cut where a sample is full; nothing is padded;
- best-fit: documents stay whole where they can (longer ones are cut every S pairs) and go, the longest first, where
  they leave the least room (Ding et al. 2024, arXiv:2404.10830); what room is left is padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.index_build import Lengths, SampleIndex, random_state


def num_pairs(lengths: Lengths) -> NDArray[np.int32]:
    """Pairs of a token and its label in each document."""
    pairs: NDArray[np.int32] = np.maximum(np.asarray(lengths) - 1, 0)
    return pairs


class Step(NamedTuple):
    """``pieces`` pieces of ``size`` go into ``bins`` bins with ``room`` (``opened``: new ones), each as many as fit."""

    size: int
    pieces: int
    room: int
    bins: int
    opened: bool


@dataclass(frozen=True)
class PackingPlan:
    """Best fit, decreasing, for pieces of which only the sizes are known: the same for every epoch of a data set."""

    capacity: int
    steps: tuple[Step, ...]

    @property
    def num_bins(self) -> int:
        """Bins used."""
        return sum(step.bins for step in self.steps if step.opened)


def plan_packing(sizes: NDArray[Any], *, capacity: int) -> PackingPlan:
    """Pack pieces of ``sizes`` (1 to ``capacity``) into bins of ``capacity``.

    All pieces of a size are placed at once: the tightest bin that takes one takes as many as it can hold, since after
    each it is even tighter. So the work depends on the number of different sizes, not of pieces.
    """
    counts = np.bincount(sizes, minlength=capacity + 1)
    free = np.zeros(capacity + 1, np.int64)  # bins by the room they have left
    steps = []
    for size in np.flatnonzero(counts)[::-1].tolist():
        left = counts.item(size)
        while left:
            fitting = np.flatnonzero(free[size:])
            opened = not fitting.size
            room = capacity if opened else size + int(fitting[0])
            each = room // size
            bins = -(-left // each) if opened else min(-(-left // each), free.item(room))
            pieces = min(left, bins * each)
            if not opened:
                free[room] -= bins
            for rest, number in _rooms_left(size, pieces, room):
                free[rest] += number
            steps.append(Step(size, pieces, room, bins, opened))
            left -= pieces
    return PackingPlan(capacity, tuple(steps))


def _rooms_left(size: int, pieces: int, room: int) -> Iterator[tuple[int, int]]:
    """Room that bins have left after a step, and how many: first those that are full, then the one that may not be."""
    full, more = divmod(pieces, room // size)
    if full:
        yield room % size, full
    if more:
        yield room - more * size, 1


def assign_bins(plan: PackingPlan) -> NDArray[np.int64]:
    """Bin of each piece, when pieces come by falling size."""
    free: dict[int, list[NDArray[np.int64]]] = {}
    parts, num_bins = [np.empty(0, np.int64)], 0
    for step in plan.steps:
        if step.opened:
            bins = np.arange(num_bins, num_bins + step.bins)
            num_bins += step.bins
        else:
            bins = _take(free[step.room], step.bins)
        parts.append(np.repeat(bins, step.room // step.size)[: step.pieces])
        used = 0
        for rest, number in _rooms_left(step.size, step.pieces, step.room):
            free.setdefault(rest, []).append(bins[used : used + number])
            used += number
    return np.concatenate(parts)


def _take(stack: list[NDArray[np.int64]], number: int) -> NDArray[np.int64]:
    """Remove ``number`` entries from a stack of arrays."""
    taken = []
    while number:
        top = stack.pop()
        if len(top) > number:
            stack.append(top[number:])
        taken.append(top[:number])
        number -= len(taken[-1])
    return np.concatenate(taken)


def cut_pieces(lengths: Lengths, *, capacity: int) -> NDArray[np.int64]:
    """Pieces of up to ``capacity`` pairs of all documents, [pieces, 3]: document, first token, pairs."""
    pairs = num_pairs(lengths).astype(np.int64)
    pieces = -(-pairs // capacity)
    documents = np.repeat(np.arange(len(pairs)), pieces)
    number = np.arange(len(documents)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    offsets = number * capacity
    return np.stack([documents, offsets, np.minimum(pairs[documents] - offsets, capacity)], axis=1)


def build_packed_epoch(lengths: Lengths, plan: PackingPlan, *, seed: int, epoch: int, copy: int = 0) -> SampleIndex:
    """Samples of one epoch: which of the pieces of a size goes where is drawn anew in each.

    ``documents`` of the index are the pieces, [pieces, 3] as ``cut_pieces`` has them, in the order of the samples;
    ``samples`` [samples, 2]: number of the first piece, and of pieces.
    """
    random = random_state(seed, copy, epoch)
    pieces = cut_pieces(lengths, capacity=plan.capacity)
    pieces = pieces[random.permutation(len(pieces))]
    pieces = pieces[np.argsort(-pieces[:, 2], kind="stable")]
    place = random.permutation(plan.num_bins)[assign_bins(plan)]
    counts = np.bincount(place, minlength=plan.num_bins)
    samples = np.stack([np.cumsum(counts) - counts, counts], axis=1)
    return SampleIndex(pieces[np.argsort(place, kind="stable")], samples)


def stream_pieces(
    pairs: NDArray[Any], documents: NDArray[Any], position: int, offset: int, *, capacity: int
) -> list[tuple[int, int, int]]:
    """Pieces (document, first token, pairs) of a padding-free sample that begins ``offset`` pairs into a document."""
    pieces, left = [], capacity
    while left:
        document = documents.item(position)
        count = min(pairs.item(document) - offset, left)
        if count > 0:
            pieces.append((document, offset, count))
            left -= count
        position, offset = position + 1, 0
    return pieces


def bounds_of(counts: list[int]) -> Iterator[tuple[int, int]]:
    """Begin and end of each of several stretches that follow each other."""
    return pairwise(np.concatenate([[0], np.cumsum(counts)]).tolist())
