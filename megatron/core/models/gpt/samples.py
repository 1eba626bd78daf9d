"""Samples for next-token prediction, cut from documents that follow each other in shuffled order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.sample_order import SampleOrder
from megatron.core.datasets.samples import Documents, OrderedDataset, Sample, check_vocabulary


@dataclass(frozen=True, kw_only=True)
class SampleLayout:
    """What a sample holds: S tokens, the S labels after them, and what the flags ask beside them.

    ``eod``: id that ends a document.
    """

    seq_length: int
    eod: int | None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False

    def sample(self, tokens: NDArray[np.int64], *, num_tokens: int) -> Sample:
        """Sample of S + 1 ``tokens``, of which the first ``num_tokens`` are real.

        ``tokens``, ``labels``, ``position_ids`` int64 [S]; ``loss_mask`` float32 [S], 0 for labels that aren't real;
        with ``reset_attention_mask`` also ``document_ids`` int32 [S]: number of the document within the sample, for
        attention only within it. A document ends with its EOD token: positions and document_ids change after it.
        """
        length = self.seq_length
        inputs = tokens[:-1]
        loss_mask = np.ones(length, np.float32)
        loss_mask[max(num_tokens - 1, 0) :] = 0
        position_ids = np.arange(length, dtype=np.int64)
        sample: Sample = {"tokens": inputs, "labels": tokens[1:], "loss_mask": loss_mask, "position_ids": position_ids}
        if self.reset_position_ids or self.reset_attention_mask or self.eod_mask_loss:
            is_eod = inputs == self.eod
            if self.eod_mask_loss:
                loss_mask[is_eod] = 0
            document_ids = np.cumsum(is_eod, dtype=np.int32) - is_eod.astype(np.int32)
            if self.reset_position_ids:
                starts = np.concatenate([[0], np.flatnonzero(is_eod) + 1])
                position_ids -= starts[document_ids]
            if self.reset_attention_mask:
                sample["document_ids"] = document_ids
        return sample


class GPTDataset(OrderedDataset):
    """Samples of ``layout.seq_length`` tokens, cut from the stream of documents.

    ``rearrange(tokens, index=…)`` makes of a sample's tokens other ones, at most as many. ``targets``: token for token
    whether it is to be learned (1) or only read (0). The rest as in OrderedDataset.
    """

    order: SampleOrder

    def __init__(
        self,
        documents: Documents,
        order: SampleOrder,
        *,
        layout: SampleLayout,
        first: int = 0,
        vocab_size: int | None = None,
        rearrange: Callable[..., NDArray[np.int64]] | None = None,
        targets: Documents | None = None,
    ) -> None:
        super().__init__(documents, first=first, vocab_size=vocab_size)
        self.order, self.layout, self._rearrange, self._targets = order, layout, rearrange, targets

    def sample(self, index: int) -> Sample:
        """What ``layout`` makes of the tokens."""
        tokens, num_tokens = self._read(index, self.documents)
        if self._vocab_size is not None and tokens.view(np.uint64).max() >= self._vocab_size:
            self._refuse(index, tokens, vocab_size=self._vocab_size)
        if self._rearrange is not None:
            rearranged = self._rearrange(tokens[:num_tokens], index=index)
            tokens[: len(rearranged)], tokens[len(rearranged) :] = rearranged, 0
            num_tokens = len(rearranged)
        sample = self.layout.sample(tokens, num_tokens=num_tokens)
        if self._targets is not None:
            sample["loss_mask"] *= self._read(index, self._targets)[0][1:]
        return sample

    def origin(self, index: int) -> str:
        """Document and token at which sample ``index`` starts."""
        start = self.order.find(index)
        document = self._first + start.documents.item(start.position)
        return f"{self.documents.prefix}, document {document} from token {start.offset}"

    def _read(self, index: int, documents: Documents) -> tuple[NDArray[np.int64], int]:
        """The tokens of a sample, S + 1 of them with zeros after the last real one, and how many are real."""
        order, position, offset = self.order.find(index)
        needed = self.layout.seq_length + 1
        tokens = np.empty(needed, np.int64)
        filled = 0
        while filled < needed and position < len(order):
            document = self._first + order.item(position)
            count = min(self.documents.lengths.item(document) - offset, needed - filled)
            tokens[filled : filled + count] = documents.get(document, offset, count)
            filled += count
            position, offset = position + 1, 0
        tokens[filled:] = 0
        return tokens, filled

    def _refuse(self, index: int, tokens: NDArray[np.int64], *, vocab_size: int) -> None:
        """DataError that names the first id outside the vocabulary and where it lies."""
        at = int(np.argmax(tokens.view(np.uint64) >= vocab_size))
        order, position, offset = self.order.find(index)
        left = at + offset
        while left >= self.documents.lengths.item(self._first + order.item(position)):
            left -= self.documents.lengths.item(self._first + order.item(position))
            position += 1
        check_vocabulary(
            tokens[at:], vocab_size, documents=self.documents, document=self._first + order.item(position), offset=left
        )
