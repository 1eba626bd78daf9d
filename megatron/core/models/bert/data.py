"""Samples of BERT: pairs of sentences with masked words, and their order."""

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
from megatron.core.tokenizers.base import MaskingTokenizer, Tokenizer
from megatron.errors import ConfigError

_NUM_SPECIAL = 3  # tokens of a sample beside its sentences


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
    """Data sets of a BERT run: pairs of texts (without ``binary_head`` single ones) with masked words, see BertMaker.

    ``--split`` counts documents. See ``build_splits`` for the rest.
    """
    known = tokenizer.vocab_size if vocab_size is None else vocab_size
    if not data.mock_data:
        check_marks_texts(tokenizer)
    vocabulary = MaskingVocabulary.mock(known) if data.mock_data else MaskingVocabulary.of(tokenizer)
    masking = MaskingRules(probability=mask_probability)
    hide_pads = data.data_order == "megatron"
    maker = BertMaker(data.seq_length, vocabulary, masking, pairs=binary_head, hide_pads=hide_pads)
    rules = SpanRules(
        max_tokens=data.seq_length - _NUM_SPECIAL,
        min_sentences=2 if binary_head else 1,
        short_probability=short_probability,
    )
    family = MaskedDatasets(data, maker, rules, seed=seed, vocab_size=known)
    return build_splits(data, family, sizes=sizes, tokenizer=tokenizer, vocab_size=known)


def check_marks_texts(tokenizer: Tokenizer) -> None:
    """Raise ConfigError for a tokenizer without the tokens that begin, separate and mask BERT's texts."""
    if not hasattr(tokenizer, "cls"):
        raise ConfigError(
            f"BERT needs tokens that start, separate and mask texts, but {tokenizer.name} names no cls_token, "
            "sep_token and mask_token in its tokenizer_config.json: give the tokenizer of a BERT"
        )


@dataclass(frozen=True)
class BertMaker(SampleMaker):
    """``[CLS] A [SEP] B [SEP]`` with masked words; without ``pairs`` ``[CLS] A [SEP]``.

    Gives int64 [S] ``text``, ``types`` (1 for B and its end), ``labels`` (the masked ids, −1 elsewhere), ``loss_mask``
    (1 where masked), ``attention_mask`` (0 for padding), and as numbers ``is_random`` (1: A and B were exchanged; −1:
    the sample has no loss) and ``truncated``. ``hide_pads``: the padding id counts as padding everywhere, also as a
    masked word's random replacement, as in Megatron-LM since core 0.16.
    """

    seq_length: int
    vocabulary: MaskingVocabulary
    rules: MaskingRules
    pairs: bool = True
    hide_pads: bool = False

    @override
    def __call__(
        self, tokens: NDArray[Any], lengths: NDArray[np.int32], target: int, random: np.random.RandomState
    ) -> Sample:
        """Sentences up to a random one are A, the others B; half of the samples exchange them."""
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
        text, types, labels, loss_mask, attention_mask = np.zeros((5, self.seq_length), np.int64)
        text[:] = self.vocabulary.pad
        text[: len(whole)] = whole
        types[len(first) + 2 : len(whole)] = 1
        labels[:] = NO_LABEL
        labels[places] = whole[places]
        loss_mask[places] = 1
        attention_mask[: len(whole)] = 1
        for place, replacement in zip(places.tolist(), replacements):
            if replacement is not None:
                text[place] = replacement
        if self.hide_pads:
            attention_mask[text == self.vocabulary.pad] = 0
        return {
            "text": text,
            "types": types,
            "labels": labels,
            "is_random": np.array(exchanged, np.int64),
            "loss_mask": loss_mask,
            "attention_mask": attention_mask,
            "truncated": np.array(size > target, np.int64),
        }

    @override
    def without_loss(self, sample: Sample) -> Sample:
        """Nothing to predict, in text or order."""
        return {**sample, "loss_mask": np.zeros_like(sample["loss_mask"]), "is_random": np.array(-1, np.int64)}


def shorten(
    first: NDArray[Any], second: NDArray[Any], target: int, random: np.random.RandomState
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Remove tokens until both together have ``target``: always one of the longer text, from a random end.

    From the longer one until both have the same length, then from the second and the first in turn.
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
