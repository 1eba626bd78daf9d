"""Training, validation and test data with masked words, from data sets of sentences."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from megatron.config.data import DataConfig
from megatron.core.datasets.build import Part, ShortSplitError, Source
from megatron.core.datasets.index_cache import IndexCache
from megatron.core.datasets.masked_samples import MaskedDataset, SampleMaker, SentenceDocuments
from megatron.core.datasets.mock import MockSentences
from megatron.core.datasets.samples import Documents
from megatron.core.datasets.spans import MegatronSpanOrder, Sentences, SpanOrder, SpanRules


class MaskedDatasets:
    """Samples of sentences with hidden words; ``--split`` counts documents."""

    def __init__(self, data: DataConfig, maker: SampleMaker, rules: SpanRules, *, seed: int, vocab_size: int) -> None:
        self._data, self._maker, self._rules = data, maker, rules
        self._seed, self._vocab_size = seed, vocab_size

    def mock(self) -> Source:
        """Sentences of made-up words."""
        return Source(MockSentences(self._maker.vocabulary.words), IndexCache(None), ids_known=True)

    def count_units(self, documents: Documents) -> int:
        """Documents."""
        return cast("SentenceDocuments", documents).num_documents

    def dataset(self, part: Part, num_samples: int | None, *, remedy: str) -> MaskedDataset:
        """Samples of a part; raises ShortSplitError when no document has enough sentences."""
        documents = cast("SentenceDocuments", part.source.documents)
        boundaries = np.asarray(documents.boundaries[part.units.start : part.units.stop + 1])
        first, stop = (int(boundaries[0]), int(boundaries[-1])) if len(boundaries) else (0, 0)
        sentences = Sentences(documents.lengths[first:stop], boundaries - first)
        where: dict[str, Any] = {"seed": self._seed, "num_samples": num_samples, "cache": part.source.cache}
        order: SpanOrder | MegatronSpanOrder
        if self._data.data_order == "megatron":
            order = MegatronSpanOrder(sentences, self._rules, **where)
        else:
            order = SpanOrder(sentences, self._rules, copy=part.copy, **where)
        if not order.samples_per_epoch:
            raise ShortSplitError(
                f"{documents.prefix}: the {part.split} split has {len(part.units)} documents, none with "
                f"{self._rules.min_sentences} sentences: make the data with tools/preprocess_data.py "
                f"--split-sentences if they were made without, or give {remedy}"
            )
        vocab_size = None if part.source.ids_known else self._vocab_size
        return MaskedDataset(documents, order, self._maker, first=first, vocab_size=vocab_size)
