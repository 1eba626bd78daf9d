"""Samples with masked words: what a family of models makes of a span of sentences."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.masking import MaskingVocabulary
from megatron.core.datasets.samples import Documents, OrderedDataset, Sample, check_vocabulary
from megatron.core.datasets.spans import MegatronSpanOrder, Span, SpanOrder

NO_LABEL = -1
"""Of a token that is not predicted."""


class SampleMaker(Protocol):
    """Makes a sample of a family of models from the tokens of some sentences."""

    @property
    def vocabulary(self) -> MaskingVocabulary:
        """The ids that it masks with."""

    def __call__(
        self, tokens: NDArray[Any], lengths: NDArray[np.int32], target: int, random: np.random.RandomState
    ) -> Sample:
        """``tokens`` of all sentences end to end, their ``lengths``, and the length the sample is to have."""

    def without_loss(self, sample: Sample) -> Sample:
        """The sample, counting for nothing."""


class SentenceDocuments(Documents, Protocol):
    """Documents of sentences, which are numbered through: an IndexedDataset, or made-up ones."""

    @property
    def boundaries(self) -> NDArray[np.int64]:
        """Sentences before each document, and all of them, [documents + 1]."""

    @property
    def num_documents(self) -> int:
        """Documents."""

    def get_range(self, first: int, stop: int) -> NDArray[Any]:
        """Tokens of sentences ``first`` to ``stop`` (not included), end to end."""


class MaskedDataset(OrderedDataset):
    """Samples of sentences, made by ``maker``; ``first`` counts sentences. The rest as in OrderedDataset."""

    documents: SentenceDocuments
    order: SpanOrder | MegatronSpanOrder

    def __init__(
        self,
        documents: SentenceDocuments,
        order: SpanOrder | MegatronSpanOrder,
        maker: SampleMaker,
        *,
        first: int = 0,
        vocab_size: int | None = None,
    ) -> None:
        super().__init__(documents, first=first, vocab_size=vocab_size)
        self.order, self._maker = order, maker

    def sample(self, index: int) -> Sample:
        """What ``maker`` makes of the sentences."""
        span = self._span(index)
        tokens = self.documents.get_range(span.first, span.stop)
        if self._vocab_size is not None:
            check_vocabulary(
                tokens.astype(np.int64), self._vocab_size, documents=self.documents, document=span.first, offset=0
            )
        lengths = self.documents.lengths[span.first : span.stop]
        return self._maker(tokens, lengths, span.target, self.order.random(index))

    def _span(self, index: int) -> Span:
        first, stop, target = self.order.find(index)
        return Span(self._first + first, self._first + stop, target)

    def origin(self, index: int) -> str:
        """Sentences of sample ``index``."""
        span = self._span(index)
        return f"{self.prefix}, sentences {span.first} to {span.stop - 1}"

    def without_loss(self, sample: Sample) -> Sample:
        """The sample, counting for nothing."""
        return self._maker.without_loss(sample)
