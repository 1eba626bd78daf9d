"""Samples of T5: texts with masked spans, and the spans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from megatron.config.data import DataConfig
from megatron.core.datasets.build import DatasetSplits, build_splits
from megatron.core.datasets.masked_dataset import NO_LABEL, MaskedDatasets, SampleMaker
from megatron.core.datasets.masking import MaskingRules, MaskingVocabulary, choose_stretches
from megatron.core.datasets.samples import Sample
from megatron.core.datasets.spans import SpanRules
from megatron.core.datasets.splits import SplitSizes
from megatron.core.tokenizers.base import SpanTokenizer
from megatron.errors import ConfigError

_NUM_SPECIAL = 2  # tokens of a sample beside its sentences


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
    """Data sets of a T5 run: text with masked spans of up to ten words, see T5Maker.

    Raises ConfigError for a tokenizer without sentinels. See ``build_splits`` for the rest.
    """
    known = tokenizer.vocab_size if vocab_size is None else vocab_size
    vocabulary = MaskingVocabulary.mock(known) if data.mock_data else MaskingVocabulary.of(tokenizer)
    if vocabulary.bos is None or vocabulary.eos is None:
        raise ConfigError(
            f"T5 begins with [BOS] and ends with [EOS], which {tokenizer.name} lacks with --vocab-size "
            f"{tokenizer.vocab_size}: leave --vocab-size out"
        )
    if not vocabulary.sentinels:
        raise ConfigError(
            "T5 replaces masked spans by sentinel tokens, but the tokenizer has none: give --vocab-extra-ids 100"
        )
    rules = MaskingRules(probability=mask_probability, longest=10, geometric=True)
    hide_pads = data.data_order == "megatron"
    maker = T5Maker(data.seq_length, decoder_seq_length, vocabulary, rules, hide_pads=hide_pads)
    spans = SpanRules(max_tokens=data.seq_length - _NUM_SPECIAL, min_sentences=1, short_probability=short_probability)
    family = MaskedDatasets(data, maker, spans, seed=seed, vocab_size=known)
    return build_splits(data, family, sizes=sizes, tokenizer=tokenizer, vocab_size=known)


@dataclass(frozen=True)
class T5Maker(SampleMaker):
    """Text whose masked spans are replaced by sentinels, and the spans for the decoder (Raffel et al. 2020).

    Gives int64 ``text_enc`` [S], ``text_dec``, ``labels`` (−1: none) and ``loss_mask`` [D], ``enc_mask`` [S] and
    ``dec_mask`` [D] (0 for padding), and the number ``truncated``. Spans stay in the text when no sentinels or no room
    in the decoder are left. ``hide_pads`` as in BertMaker.
    """

    seq_length: int
    decoder_seq_length: int
    vocabulary: MaskingVocabulary
    rules: MaskingRules
    hide_pads: bool = False

    @override
    def __call__(
        self, tokens: NDArray[Any], lengths: NDArray[np.int32], target: int, random: np.random.RandomState
    ) -> Sample:
        """Sentences end to end, cut to the target."""
        size, tokens = len(tokens), tokens[:target].astype(np.int64)
        stretches = choose_stretches(tokens, self.rules, self.vocabulary, random, target=target)
        spans = sorted((int(places[0]), int(places[-1]) + 1) for places in stretches)
        encoder, decoder, kept_from = list[int](), list[int](), 0
        for sentinel, (start, stop) in zip(self.vocabulary.sentinels, spans):
            if len(decoder) + 1 + stop - start >= self.decoder_seq_length:
                break
            encoder += [*tokens[kept_from:start].tolist(), sentinel]
            decoder += [sentinel, *tokens[start:stop].tolist()]
            kept_from = stop
        encoder += tokens[kept_from:].tolist()
        assert self.vocabulary.bos is not None and self.vocabulary.eos is not None, "build_t5_splits asks for both"
        text_enc, enc_mask = self._padded(encoder, self.seq_length, self.vocabulary.pad)
        text_dec, dec_mask = self._padded([self.vocabulary.bos, *decoder], self.decoder_seq_length, self.vocabulary.pad)
        labels, loss_mask = self._padded([*decoder, self.vocabulary.eos], self.decoder_seq_length, NO_LABEL)
        return {
            "text_enc": text_enc,
            "text_dec": text_dec,
            "labels": labels,
            "loss_mask": loss_mask,
            "enc_mask": enc_mask,
            "dec_mask": dec_mask,
            "truncated": np.array(size > target, np.int64),
        }

    def _padded(self, ids: list[int], length: int, fill: int) -> NDArray[np.int64]:
        """Ids filled up to ``length``, and 1 where they are real: [2, length]."""
        both = np.zeros((2, length), np.int64)
        both[0] = fill
        both[0, : len(ids)] = ids
        both[1, : len(ids)] = 1
        if self.hide_pads:
            both[1, both[0] == fill] = 0
        return both
