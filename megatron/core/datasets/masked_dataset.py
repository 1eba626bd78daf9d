"""Data with masked words: samples that a family of models makes of spans of sentences."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from megatron.config.data import DataConfig
from megatron.core.datasets.build import Part, ShortSplitError, Source
from megatron.core.datasets.index_cache import IndexCache
from megatron.core.datasets.masking import MaskingVocabulary
from megatron.core.datasets.mock import MockSentences
from megatron.core.datasets.samples import Documents, OrderedDataset, Sample, check_vocabulary
from megatron.core.datasets.spans import MegatronSpanOrder, Sentences, Span, SpanOrder, SpanRules

NO_LABEL = -1
"""Label of a token that is not predicted."""


class SampleMaker(ABC):
    """Makes a sample of a family of models from the tokens of some sentences; ``vocabulary``: the ids it masks with."""

    vocabulary: MaskingVocabulary

    @abstractmethod
    def __call__(
        self, tokens: NDArray[Any], lengths: NDArray[np.int32], target: int, random: np.random.RandomState
    ) -> Sample:
        """``tokens`` of all sentences end to end, their ``lengths``, and the target length of the sample."""

    def without_loss(self, sample: Sample) -> Sample:
        """The sample with all losses masked."""
        return {**sample, "loss_mask": np.zeros_like(sample["loss_mask"])}


class SentenceDocuments(Documents, Protocol):
    """Documents of sentences: an IndexedDataset, or mock data.

    Sentences are numbered across documents; ``boundaries`` [documents + 1]: sentences before each document, and all.
    """

    boundaries: NDArray[np.int64]

    @property
    def num_documents(self) -> int:
        """Number of documents."""

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

    @override
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

    @override
    def origin(self, index: int) -> str:
        """Sentences of sample ``index``."""
        span = self._span(index)
        return f"{self.prefix}, sentences {span.first} to {span.stop - 1}"

    @override
    def without_loss(self, sample: Sample) -> Sample:
        """The sample with all losses masked."""
        return self._maker.without_loss(sample)


class MaskedDatasets:
    """Samples of sentences with masked tokens; ``--split`` counts documents."""

    def __init__(self, data: DataConfig, maker: SampleMaker, rules: SpanRules, *, seed: int, vocab_size: int) -> None:
        self._data, self._maker, self._rules = data, maker, rules
        self._seed, self._vocab_size = seed, vocab_size

    def mock(self) -> Source:
        """Sentences of made-up words."""
        return Source(MockSentences(self._maker.vocabulary.words), IndexCache(None), ids_known=True)

    def count_units(self, documents: Documents) -> int:
        """Number of documents."""
        return cast("SentenceDocuments", documents).num_documents

    def dataset(self, part: Part, num_samples: int | None, *, remedy: str) -> MaskedDataset:
        """Samples of a part; raises ShortSplitError when no document has enough sentences."""
        documents = cast("SentenceDocuments", part.source.documents)
        boundaries = np.asarray(documents.boundaries[part.units.start : part.units.stop + 1])
        first, stop = (int(boundaries[0]), int(boundaries[-1])) if len(boundaries) else (0, 0)
        sentences = Sentences(documents.lengths[first:stop], boundaries - first)
        settings: dict[str, Any] = {"seed": self._seed, "num_samples": num_samples, "cache": part.source.cache}
        order: SpanOrder | MegatronSpanOrder
        if self._data.data_order == "megatron":
            order = MegatronSpanOrder(sentences, self._rules, **settings)
        else:
            order = SpanOrder(sentences, self._rules, copy=part.copy, **settings)
        if not order.samples_per_epoch:
            raise ShortSplitError(
                f"{documents.prefix}: the {part.split} split has {len(part.units)} documents, none with "
                f"{self._rules.min_sentences} sentences: make the data with tools/preprocess_data.py "
                f"--split-sentences if they were made without, or give {remedy}"
            )
        vocab_size = None if part.source.ids_known else self._vocab_size
        return MaskedDataset(documents, order, self._maker, first=first, vocab_size=vocab_size)
