"""Samples cut from documents that follow each other in shuffled order, for any family of models."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from megatron.config.data import DataConfig
from megatron.core.datasets.build import Part
from megatron.core.datasets.sample_order import EpochOrder, MegatronOrder
from megatron.core.datasets.samples import Documents, OrderedDataset, check_vocabulary


class StreamDataset(OrderedDataset):
    """Samples of consecutive tokens; a subclass defines what a sample makes of them. The rest as in OrderedDataset."""

    order: EpochOrder | MegatronOrder

    def __init__(
        self,
        documents: Documents,
        order: EpochOrder | MegatronOrder,
        *,
        first: int = 0,
        vocab_size: int | None = None,
    ) -> None:
        super().__init__(documents, first=first, vocab_size=vocab_size)
        self.order = order

    @override
    def origin(self, index: int) -> str:
        """Document and token at which sample ``index`` starts."""
        start = self.order.find(index)
        document = self._first + start.documents.item(start.position)
        return f"{self.documents.prefix}, document {document} from token {start.offset}"

    def read(self, index: int, count: int, *, documents: Documents | None = None) -> tuple[NDArray[np.int64], int]:
        """``count`` tokens from where sample ``index`` begins, with zeros after the last one of the epoch, and how many
        are real. Raises DataError for an id outside the vocabulary.

        ``documents``: others of the same lengths, such as masks of tokens, which aren't checked.
        """
        order, position, offset = self.order.find(index)
        source = documents or self.documents
        tokens, filled = np.empty(count, np.int64), 0
        while filled < count and position < len(order):
            document = self._first + order.item(position)
            size = min(source.lengths.item(document) - offset, count - filled)
            tokens[filled : filled + size] = source.get(document, offset, size)
            filled += size
            position, offset = position + 1, 0
        tokens[filled:] = 0
        if documents is None and self._vocab_size is not None and tokens.view(np.uint64).max() >= self._vocab_size:
            self._refuse(index, tokens, vocab_size=self._vocab_size)
        return tokens, filled

    def _refuse(self, index: int, tokens: NDArray[np.int64], *, vocab_size: int) -> None:
        """Raise the DataError of the first id outside the vocabulary."""
        at = int(np.argmax(tokens.view(np.uint64) >= vocab_size))
        order, position, offset = self.order.find(index)
        left = at + offset
        while left >= self.documents.lengths.item(self._first + order.item(position)):
            left -= self.documents.lengths.item(self._first + order.item(position))
            position += 1
        check_vocabulary(
            tokens[at:], vocab_size, documents=self.documents, document=self._first + order.item(position), offset=left
        )


def stream_order(
    part: Part, data: DataConfig, *, seed: int, seq_length: int, num_samples: int | None
) -> EpochOrder | MegatronOrder:
    """The order of ``--data-order`` for a part of a source: samples begin ``seq_length`` tokens apart, and each has one
    more token after it.
    """
    lengths = part.source.documents.lengths[part.units.start : part.units.stop]
    if data.data_order == "megatron":
        return MegatronOrder(
            lengths, seed=seed, seq_length=seq_length, num_samples=num_samples, cache=part.source.cache
        )
    return EpochOrder(
        lengths,
        seed=seed,
        seq_length=seq_length,
        num_samples=num_samples,
        cache=part.source.cache,
        copy=part.copy,
    )
