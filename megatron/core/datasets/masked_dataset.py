"""Training, validation and test data of BERT and T5 runs, from data sets of sentences."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from megatron.config.data import DataConfig
from megatron.core.datasets.build import DatasetSplits, Part, ShortSplitError, Source, build_splits
from megatron.core.datasets.index_cache import IndexCache
from megatron.core.datasets.masked_samples import (
    BertMaker,
    MaskedDataset,
    SampleMaker,
    SentenceDocuments,
    T5Maker,
)
from megatron.core.datasets.masking import MaskingRules, MaskingVocabulary, check_marks_texts
from megatron.core.datasets.mock import MockSentences
from megatron.core.datasets.samples import Documents
from megatron.core.datasets.spans import MegatronSpanOrder, Sentences, SpanOrder, SpanRules
from megatron.core.datasets.splits import SplitSizes
from megatron.core.tokenizers.base import MaskingTokenizer, SpanTokenizer
from megatron.errors import ConfigError

_BERT_SPECIAL, _T5_SPECIAL = 3, 2  # tokens that a sample holds beside its sentences


def build_bert_splits(
    data: DataConfig,
    *,
    seed: int,
    sizes: SplitSizes,
    tokenizer: MaskingTokenizer,
    vocab_size: int | None = None,
    binary_head: bool = True,
    mask_probability: float = 0.15,
    short_probability: float = 0.1,
) -> DatasetSplits:
    """Data sets of a BERT run: pairs of sentences (without ``binary_head`` single ones) with hidden words.

    Samples are as BertMaker describes them; ``--split`` counts documents. See ``build_splits`` for the rest.
    """
    known = tokenizer.vocab_size if vocab_size is None else vocab_size
    if not data.mock_data:
        check_marks_texts(tokenizer)
    vocabulary = MaskingVocabulary.made_up(known) if data.mock_data else MaskingVocabulary.of(tokenizer)
    masking = MaskingRules(probability=mask_probability)
    hide_pads = data.data_order == "megatron"
    maker = BertMaker(data.seq_length, vocabulary, masking, pairs=binary_head, hide_pads=hide_pads)
    rules = SpanRules(
        max_tokens=data.seq_length - _BERT_SPECIAL,
        min_sentences=2 if binary_head else 1,
        short_probability=short_probability,
    )
    family = MaskedFamily(data, maker, rules, seed=seed, vocab_size=known)
    return build_splits(data, family, sizes=sizes, tokenizer=tokenizer, vocab_size=known)


def build_t5_splits(
    data: DataConfig,
    *,
    seed: int,
    sizes: SplitSizes,
    tokenizer: SpanTokenizer,
    decoder_seq_length: int,
    vocab_size: int | None = None,
    mask_probability: float = 0.15,
    short_probability: float = 0.1,
) -> DatasetSplits:
    """Data sets of a T5 run: text with hidden spans of up to ten words, as T5Maker describes them.

    Raises ConfigError for a tokenizer without sentinels. See ``build_splits`` for the rest.
    """
    known = tokenizer.vocab_size if vocab_size is None else vocab_size
    vocabulary = MaskingVocabulary.made_up(known) if data.mock_data else MaskingVocabulary.of(tokenizer)
    if vocabulary.bos is None or vocabulary.eos is None:
        raise ConfigError(
            f"T5 begins with [BOS] and ends with [EOS], which --vocab-size {tokenizer.vocab_size} leaves out of "
            f"{tokenizer.name}: leave --vocab-size out"
        )
    if not vocabulary.sentinels:
        raise ConfigError("T5 replaces hidden spans by sentinels, of which there are none: give --vocab-extra-ids 100")
    rules = MaskingRules(probability=mask_probability, longest=10, geometric=True)
    hide_pads = data.data_order == "megatron"
    maker = T5Maker(data.seq_length, decoder_seq_length, vocabulary, rules, hide_pads=hide_pads)
    spans = SpanRules(max_tokens=data.seq_length - _T5_SPECIAL, min_sentences=1, short_probability=short_probability)
    family = MaskedFamily(data, maker, spans, seed=seed, vocab_size=known)
    return build_splits(data, family, sizes=sizes, tokenizer=tokenizer, vocab_size=known)


class MaskedFamily:
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
                f"{self._rules.min_sentences} sentences: make the data with tools/preprocess_data.py --split-sentences "
                f"if they were made without, else give {remedy}"
            )
        vocab_size = None if part.source.ids_known else self._vocab_size
        return MaskedDataset(documents, order, self._maker, first=first, vocab_size=vocab_size)
