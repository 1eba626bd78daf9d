"""Samples in which every document stands by itself: attended to, numbered and predicted within its own borders."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.index_build import Lengths
from megatron.core.datasets.index_cache import IndexCache, digest_of
from megatron.core.datasets.packing import (
    bounds_of,
    build_packed_epoch,
    cut_pieces,
    num_pairs,
    plan_packing,
    stream_pieces,
)
from megatron.core.datasets.sample_order import EpochOrder, Epochs
from megatron.core.datasets.samples import Documents, EndlessOrder, Order, OrderedDataset, Sample, check_vocabulary

Piece = tuple[int, int, int]
"""A document's number, the first token, and how many pairs of a token and its label."""


class PieceOrder(Order, Protocol):
    """Says which pieces of documents each sample holds; samples come epoch by epoch, without an end."""

    def pieces(self, index: int) -> list[Piece]:
        """Pieces of sample ``index``."""


class PaddingFreeOrder(EpochOrder):
    """The documents' pairs as a stream, cut every ``seq_length``: every sample is full. The rest as in EpochOrder."""

    def __init__(self, lengths: Lengths, *, seq_length: int, **settings: Any) -> None:
        self._pairs, self._seq_length = num_pairs(lengths), seq_length
        super().__init__(self._pairs, seq_length=seq_length, shared=0, **settings)

    def pieces(self, index: int) -> list[Piece]:
        """Pieces of sample ``index``."""
        documents, position, offset = self.find(index)
        return stream_pieces(self._pairs, documents, position, offset, capacity=self._seq_length)


class BestFitOrder(EndlessOrder):
    """Whole documents, as many as fit; the rest of a sample is padding, ``padding`` of all. Else as EpochOrder."""

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
        sizes = cut_pieces(lengths, capacity=seq_length)[:, 2]
        plan = plan_packing(sizes, capacity=seq_length)
        self.padding = 1 - int(sizes.sum()) / max(plan.num_bins * seq_length, 1)
        self._epochs = Epochs(
            partial(build_packed_epoch, lengths, plan, seed=seed, copy=copy),
            samples_per_epoch=plan.num_bins,
            rows=len(sizes) + plan.num_bins,
            digest=digest_of("best-fit", lengths, seed, copy, seq_length),
            cache=cache,
        )
        super().__init__(digest=self._epochs.digest, samples_per_epoch=plan.num_bins, num_samples=num_samples)

    def pieces(self, index: int) -> list[Piece]:
        """Pieces of sample ``index``."""
        found, number = self._epochs.find(index)
        first, count = found.samples[number].tolist()
        return [(document, offset, size) for document, offset, size in found.documents[first : first + count].tolist()]

    def prepare(self) -> None:
        """Put all indices that the samples need into the cache."""
        self._epochs.prepare(len(self))


class PackedDataset(OrderedDataset):
    """Samples of ``seq_length`` pairs of a token and its label.

    Beside what GPTDataset gives, every sample has ``document_ids`` int32 [S], the number of the piece, and positions
    start anew in each; padding is a piece of its own, without loss. ``targets``: token for token whether it is to be
    learned (1) or only read (0). The rest as in OrderedDataset.
    """

    order: PieceOrder

    def __init__(
        self,
        documents: Documents,
        order: PieceOrder,
        *,
        seq_length: int,
        first: int = 0,
        vocab_size: int | None = None,
        targets: Documents | None = None,
    ) -> None:
        super().__init__(documents, first=first, vocab_size=vocab_size)
        self.order, self._seq_length, self._targets = order, seq_length, targets

    def sample(self, index: int) -> Sample:
        """The pieces side by side."""
        pieces, length = self.order.pieces(index), self._seq_length
        tokens, labels, position_ids = np.zeros((3, length), np.int64)
        loss_mask, document_ids = np.zeros(length, np.float32), np.full(length, len(pieces), np.int32)
        for number, (piece, (start, stop)) in enumerate(zip(pieces, bounds_of([count for _, _, count in pieces]))):
            read = self._read(piece)
            tokens[start:stop], labels[start:stop] = read[:-1], read[1:]
            position_ids[start:stop] = np.arange(stop - start)
            loss_mask[start:stop] = 1 if self._targets is None else self._is_target(piece)
            document_ids[start:stop] = number
        return {
            "tokens": tokens,
            "labels": labels,
            "loss_mask": loss_mask,
            "position_ids": position_ids,
            "document_ids": document_ids,
        }

    def _read(self, piece: Piece) -> NDArray[np.int64]:
        document, offset, count = piece
        tokens = self.documents.get(self._first + document, offset, count + 1).astype(np.int64)
        if self._vocab_size is not None:
            check_vocabulary(
                tokens, self._vocab_size, documents=self.documents, document=self._first + document, offset=offset
            )
        return tokens

    def _is_target(self, piece: Piece) -> NDArray[np.float32]:
        """Which labels are to be learned."""
        assert self._targets is not None
        document, offset, count = piece
        return self._targets.get(self._first + document, offset + 1, count).astype(np.float32)

    def origin(self, index: int) -> str:
        """Documents and tokens of sample ``index``."""
        pieces = [f"{self._first + document} from token {offset}" for document, offset, _ in self.order.pieces(index)]
        return f"{self.prefix}, document {', '.join(pieces)}"

    def describe(self) -> list[str]:
        """The source, in a line."""
        padding = f", {self.order.padding:.1%} padding" if isinstance(self.order, BestFitOrder) else ""
        return [f"{line}{padding}" for line in super().describe()]
