"""Samples of BERT and T5: what a span of sentences becomes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.masking import MaskingRules, MaskingVocabulary, choose_stretches
from megatron.core.datasets.samples import Documents, OrderedDataset, Sample, check_vocabulary
from megatron.core.datasets.spans import MegatronSpanOrder, Span, SpanOrder

_NO_LABEL = -1


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


@dataclass(frozen=True)
class BertMaker:
    """``[CLS] A [SEP] B [SEP]`` with hidden words; without ``pairs`` ``[CLS] A [SEP]``.

    Gives int64 [S] ``text``, ``types`` (1 for B and its end), ``labels`` (the hidden ids, −1 elsewhere), ``loss_mask``
    (1 where hidden), ``padding_mask`` (1 for what is no padding), and as numbers ``is_random`` (1: A and B were
    exchanged; −1: the sample counts for nothing) and ``truncated``. ``hide_pads``: the padding id is padding
    wherever it is, also as a hidden word's random replacement, as in Megatron-LM since core 0.16.
    """

    seq_length: int
    vocabulary: MaskingVocabulary
    rules: MaskingRules
    pairs: bool = True
    hide_pads: bool = False

    def __call__(
        self, tokens: NDArray[Any], lengths: NDArray[np.int32], target: int, random: np.random.RandomState
    ) -> Sample:
        """Sentences up to a random one are A, the others B; exchanged in half of the samples."""
        cut, exchanged = len(tokens), False
        if self.pairs:
            pivot = random.randint(1, len(lengths)) if len(lengths) >= 3 else 1
            exchanged = bool(random.random_sample() < 0.5)
            cut = int(lengths[:pivot].sum())
        first, second = (tokens[cut:], tokens[:cut]) if exchanged else (tokens[:cut], tokens[cut:])
        size = len(tokens)
        first, second = shorten(first, second, target, random)
        cls, sep = [self.vocabulary.cls], [self.vocabulary.sep]
        whole = np.concatenate([cls, first, sep, *((second, sep) if len(second) else ())]).astype(np.int64)

        replacements = list[int | None]()
        stretches = choose_stretches(
            whole, self.rules, self.vocabulary, random, target=target, replacements=replacements
        )
        places = np.concatenate([np.empty(0, np.int64), *stretches])
        text, types, labels, loss_mask, padding_mask = np.zeros((5, self.seq_length), np.int64)
        text[:] = self.vocabulary.pad
        text[: len(whole)] = whole
        types[len(first) + 2 : len(whole)] = 1
        labels[:] = _NO_LABEL
        labels[places] = whole[places]
        loss_mask[places] = 1
        padding_mask[: len(whole)] = 1
        for place, replacement in zip(places.tolist(), replacements):
            if replacement is not None:
                text[place] = replacement
        if self.hide_pads:
            padding_mask[text == self.vocabulary.pad] = 0
        return {
            "text": text,
            "types": types,
            "labels": labels,
            "is_random": np.array(exchanged, np.int64),
            "loss_mask": loss_mask,
            "padding_mask": padding_mask,
            "truncated": np.array(size > target, np.int64),
        }

    def without_loss(self, sample: Sample) -> Sample:
        """Nothing to predict, in text or order."""
        return {**sample, "loss_mask": np.zeros_like(sample["loss_mask"]), "is_random": np.array(-1, np.int64)}


def shorten(
    first: NDArray[Any], second: NDArray[Any], target: int, random: np.random.RandomState
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Take tokens away until both together have ``target``: always one of the longer, from a random end.

    From the longer until both are as long, then from the second and the first in turn.
    """
    excess = len(first) + len(second) - target
    if excess <= 0:
        return first, second
    from_front = random.random_sample(excess) < 0.5
    uneven = min(abs(len(first) - len(second)), excess)
    of_first = np.arange(excess) - uneven & 1 == 1
    of_first[:uneven] = len(first) > len(second)
    kept = []
    for part, mine in ((first, of_first), (second, ~of_first)):
        front = int(np.count_nonzero(from_front & mine))
        kept.append(part[front : len(part) - (int(np.count_nonzero(mine)) - front)])
    return kept[0], kept[1]


@dataclass(frozen=True)
class T5Maker:
    """Text whose hidden spans are replaced by sentinels, and the spans for the decoder (Raffel et al. 2020).

    Gives int64 ``text_enc`` [S], ``text_dec``, ``labels`` (−1: none) and ``loss_mask`` [D], masks of what is no padding
    ``enc_mask`` [S] and ``dec_mask`` [D], and the number ``truncated``. Spans for which no sentinel or no room in the
    decoder is left stay in the text. ``hide_pads`` as BertMaker's.
    """

    seq_length: int
    decoder_seq_length: int
    vocabulary: MaskingVocabulary
    rules: MaskingRules
    hide_pads: bool = False

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
        labels, loss_mask = self._padded([*decoder, self.vocabulary.eos], self.decoder_seq_length, _NO_LABEL)
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

    def without_loss(self, sample: Sample) -> Sample:
        """Nothing to predict."""
        return {**sample, "loss_mask": np.zeros_like(sample["loss_mask"])}


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
