"""Which tokens of a sample are masked, and what replaces them.

Stretches of one to a few whole words are masked, drawn without overlap until about ``probability`` of the tokens are:
short stretches more often (probability 1/n), or, for spans, by a geometric distribution (SpanBERT, Joshi et al. 2019).
Random numbers are drawn in Megatron-LM's sequence, so that its seeds give its samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.core.tokenizers.base import SpanTokenizer
from megatron.errors import ConfigError

_NO_TOKEN = -1
_GEOMETRIC = 0.2
_MOCK_SPECIAL, _MOCK_SENTINELS = 6, 100


@dataclass(frozen=True, kw_only=True)
class MaskingRules:
    """``probability`` that a token is masked, ``longest`` stretch in words, and how lengths of stretches are drawn."""

    probability: float = 0.15
    longest: int = 3
    geometric: bool = False
    whole_words: bool = True


@dataclass(frozen=True)
class MaskingVocabulary:
    """The ids that masking needs; the first three are −1 where a vocabulary lacks them.

    ``bos``: the id that a decoder begins with. ``continues`` [vocabulary]: whether an id continues the previous word.
    """

    cls: int
    sep: int
    mask: int
    pad: int
    bos: int | None
    eos: int | None
    sentinels: tuple[int, ...]
    continues: NDArray[np.bool_] = field(repr=False)

    @classmethod
    def of(cls, tokenizer: SpanTokenizer) -> MaskingVocabulary:
        """Ids of a tokenizer; raises ConfigError for a kind without ids for masking."""
        if not hasattr(tokenizer, "sentinels") or tokenizer.pad is None:
            lacking = "names no padding" if hasattr(tokenizer, "sentinels") else "has no tokens to mask with"
            raise ConfigError(
                f"--tokenizer-type {tokenizer.name} {lacking}: masked samples need BertWordPieceLowerCase, "
                "BertWordPieceCase, SentencePieceTokenizer, or a HuggingFaceTokenizer with such tokens"
            )
        return cls(
            getattr(tokenizer, "cls", _NO_TOKEN),
            getattr(tokenizer, "sep", _NO_TOKEN),
            getattr(tokenizer, "mask", _NO_TOKEN),
            tokenizer.pad,
            tokenizer.decoder_start,
            tokenizer.eos,
            tokenizer.sentinels,
            np.array(tokenizer.continuations(), bool),
        )

    @classmethod
    def mock(cls, vocab_size: int) -> MaskingVocabulary:
        """Ids for mock data: special tokens first, sentinels last; ConfigError when no ids are left for words."""
        sentinels = range(vocab_size - min(vocab_size // 4, _MOCK_SENTINELS), vocab_size)
        if sentinels.start <= _MOCK_SPECIAL:
            raise ConfigError(
                f"--vocab-size {vocab_size - 1} leaves no ordinary words for --mock-data; give at least 16"
            )
        cls_id, sep, mask, pad, bos, eos = range(_MOCK_SPECIAL)
        return cls(cls_id, sep, mask, pad, bos, eos, tuple(sentinels), np.zeros(vocab_size, bool))

    @property
    def words(self) -> range:
        """The ids between the special tokens and the sentinels of mock data."""
        return range(_MOCK_SPECIAL, self.sentinels[0])


def choose_stretches(
    tokens: NDArray[Any],
    rules: MaskingRules,
    vocabulary: MaskingVocabulary,
    random: np.random.RandomState,
    *,
    target: int,
    replacements: list[int | None] | None = None,
) -> list[NDArray[np.int64]]:
    """Places of the masked tokens, an array for each stretch, in the order in which they are drawn.

    ``target``: the sample's target length. ``replacements``: a list to append each masked token's replacement to (80 %
    the mask, 10 % a random id, 10 % None: the token itself); None: no replacements are drawn.
    """
    places = np.flatnonzero((tokens != vocabulary.cls) & (tokens != vocabulary.sep))
    if not len(places):
        return []
    begins = ~vocabulary.continues[tokens[places]] if rules.whole_words else np.ones(len(places), bool)
    begins[0] = True
    words = [*np.flatnonzero(begins).tolist(), len(places)]  # the start of each in places, and the end
    budget = min(rules.probability * target, max(1, round(len(tokens) * rules.probability)))
    order = np.arange(len(words) - 1)
    random.shuffle(order)
    shares = _cumulative_shares(rules.longest)
    hidden, count, stretches = bytearray(len(places)), 0, list[NDArray[np.int64]]()
    draw = random.random_sample
    for word in order.tolist():
        if count + 1 > budget:
            break
        if rules.geometric:
            length = min(int(random.geometric(_GEOMETRIC)), rules.longest)
        else:
            length = int(shares.searchsorted(draw(), side="right")) + 1
        start = words[word]
        stop = _longest_end(words, word, length, most=start + budget - count)
        if stop == start or any(hidden[start:stop]):
            continue
        hidden[start:stop] = b"\x01" * (stop - start)
        count += stop - start
        stretches.append(places[start:stop])
        if replacements is not None:
            replacements += [_replacement(vocabulary, random) for _ in range(stop - start)]
    return stretches


def _longest_end(words: list[int], word: int, length: int, *, most: float) -> int:
    """End of the longest stretch of up to ``length`` words from ``word`` that ends by ``most``; its start if none."""
    for last in range(min(word + length, len(words) - 1), word, -1):
        if words[last] <= most:
            return words[last]
    return words[word]


def _replacement(vocabulary: MaskingVocabulary, random: np.random.RandomState) -> int | None:
    if random.random_sample() < 0.8:
        return vocabulary.mask
    if random.random_sample() < 0.5:
        return None
    return int(random.randint(0, len(vocabulary.continues)))


@lru_cache
def _cumulative_shares(longest: int) -> NDArray[np.float64]:
    """Cumulative probabilities of stretches of 1 to ``longest`` words, in proportion to 1/n."""
    shares = 1.0 / (np.arange(longest) + 1)
    shares /= shares.sum()
    shares /= shares.sum()
    cumulative: NDArray[np.float64] = np.cumsum(shares)
    cumulative /= cumulative[-1]
    return cumulative
