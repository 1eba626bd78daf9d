"""Samples of whole documents: each document is attended to, numbered and predicted within its own borders.

A document of n tokens is n − 1 pairs of a token and its label, and no pair crosses into another document. Two ways to
fill samples of S pairs:

- padding-free: the documents' pairs follow each other and are cut where a sample is full; nothing is padded;
- best-fit: documents stay whole where they can (longer ones are cut every S pairs). Each, the longest first, goes into
  the sample where it leaves the least room (Ding et al. 2024, arXiv:2404.10830); the remaining room is padding.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from megatron.core.datasets.cut_documents import CutDocuments
from megatron.core.datasets.index_build import Lengths, SampleIndex, random_state
from megatron.core.datasets.index_cache import IndexCache, digest_of
from megatron.core.datasets.sample_order import EpochOrder, IndexedOrder
from megatron.core.datasets.samples import TEXT_LENGTH, Documents, OrderedDataset, Sample, check_vocabulary

Piece = tuple[int, int, int]
"""A document's number, the first token, and how many pairs of a token and its label."""


def num_pairs(lengths: Lengths) -> NDArray[np.int32]:
    """Pairs of a token and its label in each document."""
    pairs: NDArray[np.int32] = np.maximum(np.asarray(lengths) - 1, 0)
    return pairs


def assign_bins(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Bin of each piece by best fit, when pieces come by falling size, [pieces].

    ``counts`` [capacity + 1]: number of pieces of each size, from 0 (of which there are none) to a bin's capacity.

    All pieces of a size are placed at once: the tightest bin that takes one takes as many as it can hold, since after
    each it is even tighter. So the number of steps depends on the number of different sizes, not of pieces.
    """
    capacity = len(counts) - 1
    free = np.zeros_like(counts)  # number of bins by the room that they have left, and the bins
    bins_with = dict[int, list[NDArray[np.int64]]]()
    parts, num_bins = [np.empty(0, np.int64)], 0
    for size in np.flatnonzero(counts)[::-1].tolist():
        left = counts.item(size)
        while left:
            fitting = np.flatnonzero(free[size:])
            room = size + int(fitting[0]) if fitting.size else capacity
            each = room // size
            needed = -(-left // each)
            if fitting.size:
                bins = _take(bins_with[room], min(needed, free.item(room)))
                free[room] -= len(bins)
            else:
                bins = np.arange(num_bins, num_bins + needed)
                num_bins += needed
            parts.append(np.repeat(bins, each)[:left])
            full, more = divmod(len(parts[-1]), each)  # the last bin may take fewer pieces
            for rest, filled in ((room % size, bins[:full]), (room - more * size, bins[full:])):
                if len(filled):
                    bins_with.setdefault(rest, []).append(filled)
                    free[rest] += len(filled)
            left -= len(parts[-1])
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
    """Pieces of up to ``capacity`` pairs of all documents, [pieces, 3] as in Piece."""
    pairs = num_pairs(lengths).astype(np.int64)
    pieces = -(-pairs // capacity)
    documents = np.repeat(np.arange(len(pairs)), pieces)
    number = np.arange(len(documents)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    offsets = number * capacity
    return np.stack([documents, offsets, np.minimum(pairs[documents] - offsets, capacity)], axis=1)


def build_packed_epoch(lengths: Lengths, *, capacity: int, seed: int, epoch: int, copy: int = 0) -> SampleIndex:
    """Samples of one epoch by best fit: each epoch draws anew which of the pieces of a size goes where.

    ``documents`` of the index are the pieces, [pieces, 3] as in Piece, in the order of the samples; ``samples``
    [samples, 2]: number of the first piece, and of pieces.
    """
    random = random_state(seed, copy, epoch)
    pieces = cut_pieces(lengths, capacity=capacity)
    pieces = pieces[random.permutation(len(pieces))]
    pieces = pieces[np.argsort(-pieces[:, 2], kind="stable")]
    bins = assign_bins(np.bincount(pieces[:, 2], minlength=capacity + 1))
    num_bins = int(bins.max(initial=-1)) + 1
    place = random.permutation(num_bins)[bins]
    counts = np.bincount(place, minlength=num_bins)
    samples = np.stack([np.cumsum(counts) - counts, counts], axis=1)
    return SampleIndex(pieces[np.argsort(place, kind="stable")], samples)


class PaddingFreeOrder(EpochOrder):
    """The documents' pairs as a stream, cut every ``seq_length``: every sample is full. The rest as in EpochOrder."""

    def __init__(self, lengths: Lengths, *, seq_length: int, **settings: Any) -> None:
        self._pairs, self._seq_length = num_pairs(lengths), seq_length
        super().__init__(self._pairs, seq_length=seq_length, shared=0, **settings)

    def pieces(self, index: int) -> list[Piece]:
        """Pieces of sample ``index``."""
        documents, position, offset = self.find(index)
        pieces, left = [], self._seq_length
        while left:
            document = documents.item(position)
            count = min(self._pairs.item(document) - offset, left)
            if count > 0:
                pieces.append((document, offset, count))
                left -= count
            position, offset = position + 1, 0
        return pieces


class BestFitOrder(IndexedOrder):
    """Whole documents, as many as fit. ``padding``: share of the samples that is padding. The rest as in EpochOrder."""

    def __init__(
        self,
        lengths: Lengths,
        *,
        seed: int,
        seq_length: int,
        num_samples: int | None,
        cache: IndexCache,
        copy: int = 0,
    ) -> None:
        pairs = num_pairs(lengths)
        counts = np.bincount(pairs % seq_length, minlength=seq_length + 1)
        counts[0], counts[seq_length] = 0, np.sum(pairs // seq_length)
        num_bins = int(assign_bins(counts).max(initial=-1)) + 1
        self.padding = 1 - int(pairs.sum(dtype=np.int64)) / max(num_bins * seq_length, 1)
        super().__init__(
            partial(build_packed_epoch, lengths, capacity=seq_length, seed=seed, copy=copy),
            digest=digest_of("best-fit", lengths, seed, copy, seq_length),
            samples_per_epoch=num_bins,
            num_samples=num_samples,
            rows=int(counts.sum()) + num_bins,
            cache=cache,
        )

    def pieces(self, index: int) -> list[Piece]:
        """Pieces of sample ``index``."""
        epoch, number = divmod(index, self.samples_per_epoch)
        found = self._epochs[epoch]
        first, count = found.samples[number].tolist()
        return [(document, offset, size) for document, offset, size in found.documents[first : first + count].tolist()]


class PackedDataset(OrderedDataset):
    """Samples of ``seq_length`` pairs of a token and its label.

    In addition to the arrays of GPTDataset, ``document_ids`` int32 [S] is the number of the piece. Positions restart in
    each piece; padding is a piece of its own, without loss, after the ``text_length`` positions of text. ``targets``:
    for each token whether it is trained on (1) or only read (0); ``cut``: documents with such targets that are longer
    than a sample. The rest as in OrderedDataset.
    """

    order: PaddingFreeOrder | BestFitOrder

    def __init__(
        self,
        documents: Documents,
        order: PaddingFreeOrder | BestFitOrder,
        *,
        seq_length: int,
        first: int = 0,
        vocab_size: int | None = None,
        targets: Documents | None = None,
        cut: CutDocuments | None = None,
    ) -> None:
        super().__init__(documents, first=first, vocab_size=vocab_size)
        self.order, self._seq_length, self._targets, self._cut = order, seq_length, targets, cut

    @override
    def sample(self, index: int) -> Sample:
        """The pieces side by side."""
        pieces, length, start = self.order.pieces(index), self._seq_length, 0
        tokens, labels, position_ids = np.zeros((3, length), np.int64)
        loss_mask, document_ids = np.zeros(length, np.float32), np.full(length, len(pieces), np.int32)
        for number, (within, offset, count) in enumerate(pieces):
            document, stop = self._first + within, start + count
            read = self.documents.get(document, offset, count + 1).astype(np.int64)
            if self._vocab_size is not None:
                check_vocabulary(read, self._vocab_size, documents=self.documents, document=document, offset=offset)
            tokens[start:stop], labels[start:stop] = read[:-1], read[1:]
            position_ids[start:stop] = np.arange(count)
            loss_mask[start:stop] = 1 if self._targets is None else self._targets.get(document, offset + 1, count)
            document_ids[start:stop] = number
            start = stop
        return {
            "tokens": tokens,
            "labels": labels,
            "loss_mask": loss_mask,
            "position_ids": position_ids,
            "document_ids": document_ids,
            TEXT_LENGTH: np.array(start, np.int64),
        }

    @override
    def origin(self, index: int) -> str:
        """Documents and tokens of sample ``index``."""
        pieces = [f"{self._first + document} from token {offset}" for document, offset, _ in self.order.pieces(index)]
        return f"{self.prefix}, document {', '.join(pieces)}"

    @override
    def describe(self) -> list[str]:
        """The source, in a line."""
        padding = f", {self.order.padding:.1%} padding" if isinstance(self.order, BestFitOrder) else ""
        cut = self._cut.describe(self) if self._cut else ""
        return [f"{line}{padding}{cut}" for line in super().describe()]
