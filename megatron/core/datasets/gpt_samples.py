"""Samples for next-token prediction, cut from documents that follow each other in shuffled order."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.index_cache import digest_of
from megatron.core.datasets.sample_order import EpochOrder, SampleOrder
from megatron.errors import DataError

Sample = dict[str, NDArray[Any]]


class Documents(Protocol):
    """Token sequences by number: an IndexedDataset, or made-up ones."""

    @property
    def prefix(self) -> str:
        """Name for messages."""

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of each document, [documents]."""

    @property
    def fingerprint(self) -> str:
        """Digest of a part of the tokens, which tells apart data whose documents have the same lengths."""

    def get(self, index: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Tokens ``[offset, offset + length)`` of a document."""


class SampleDataset(Protocol):
    """Samples by number."""

    @property
    def digest(self) -> str:
        """Hex digest of document lengths, seed and settings, which decide all samples' places; ranks compare it."""

    def __len__(self) -> int:
        """Number of samples."""

    def __getitem__(self, index: int | None) -> Sample:
        """Sample ``index``; None gives one that counts for nothing, to fill a batch."""

    def origin(self, index: int) -> str:
        """Where a sample's tokens lie, for messages."""

    def describe(self) -> list[str]:
        """What the samples come from, a line per source."""


class SourceDataset(SampleDataset, Protocol):
    """Samples of one source, as many as are asked for."""

    @property
    def prefix(self) -> str:
        """The source's name for messages."""

    def with_samples(self, num_samples: int) -> SourceDataset:
        """The same samples, and more or fewer of them."""

    def prepare(self) -> None:
        """Put all indices that the samples need into the cache."""


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
        with ``reset_attention_mask`` also ``segments`` int32 [S]: number of the document within the sample, for
        attention only within it. A document ends with its EOD token: positions and segments change after it.
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
            segments = np.cumsum(is_eod, dtype=np.int32) - is_eod.astype(np.int32)
            if self.reset_position_ids:
                starts = np.concatenate([[0], np.flatnonzero(is_eod) + 1])
                position_ids -= starts[segments]
            if self.reset_attention_mask:
                sample["segments"] = segments
        return sample


class GPTDataset:
    """Samples of ``layout.seq_length`` tokens from ``documents`` in ``order``.

    ``first``: number of the document that the order calls 0 (the order counts within a split).
    ``vocab_size``: check ids against it while reading, for data whose largest id isn't known; None: don't.
    ``rearrange(tokens, index=…)`` makes of a sample's tokens other ones, at most as many. ``targets``: token for token
    whether it is to be learned (1) or only read (0).
    """

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
        self.documents = documents
        self._rearrange, self._targets = rearrange, targets
        self.order = order
        self.layout = layout
        self._first = first
        self._vocab_size = vocab_size

    @property
    def digest(self) -> str:
        """Hex digest of what decides which samples are read."""
        return digest_of(self.order.digest, self.documents.fingerprint)

    @property
    def prefix(self) -> str:
        """The source's name for messages."""
        return self.documents.prefix

    def with_samples(self, num_samples: int) -> GPTDataset:
        """The same samples, and more or fewer of them; only in an order that doesn't depend on their number."""
        assert isinstance(self.order, EpochOrder), "Megatron-LM's order is another one for every number of samples"
        other = copy(self)
        other.order = self.order.with_samples(num_samples)
        return other

    @property
    def num_epochs(self) -> float:
        """How often the documents are read."""
        return len(self) / max(self.order.samples_per_epoch, 1)

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int | None) -> Sample:
        if index is None:
            sample = self[0]
            sample["loss_mask"][:] = 0
            return sample
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a data set of {len(self)}")
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

    def describe(self) -> list[str]:
        """The source, in a line."""
        return [f"{self.documents.prefix}: {len(self):,} samples, {self.num_epochs:.2f} epochs"]

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

    def prepare(self) -> None:
        """Put all indices that the samples need into the cache."""
        self.order.prepare()


def check_vocabulary(
    tokens: NDArray[np.int64], vocab_size: int, *, documents: Documents, document: int, offset: int
) -> None:
    """Raise DataError that names the first id outside the vocabulary and where it lies.

    ``tokens`` begin ``offset`` tokens into a document.
    """
    outside = tokens.view(np.uint64) >= vocab_size
    if outside.any():
        at = int(np.argmax(outside))
        raise DataError(
            f"{documents.prefix} holds token id {tokens[at]} (document {document}, token {offset + at}) but the "
            f"vocabulary has ids 0 to {vocab_size - 1}: the data was made with another tokenizer; give that one, or "
            "preprocess the text again"
        )
