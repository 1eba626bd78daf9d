"""Mock documents, to try a model without any files."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_NUM_DOCUMENTS = 100_000
_LENGTHS = (1, 4096)
_TEXTS, _SENTENCES, _SENTENCE_LENGTHS = 10_000, (2, 25), (3, 60)
_STRIDE = 7919


class MockDocuments:
    """100,000 documents of 1 to 4,095 tokens that count 1, 2, 3 … and end with EOD, as in Megatron-LM's mock data.

    Counting restarts at the end of a smaller vocabulary.
    """

    prefix = fingerprint = "mock data"

    def __init__(self, *, eod: int, vocab_size: int) -> None:
        self.lengths: NDArray[np.int32] = np.random.default_rng(0).integers(*_LENGTHS, _NUM_DOCUMENTS).astype(np.int32)
        self._counting = np.arange(_LENGTHS[1]) % vocab_size
        self._eod = eod

    def get(self, index: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Tokens ``[offset, offset + length)`` of a document."""
        end = self.lengths.item(index)
        stop = end if length is None else offset + length
        tokens = self._counting[offset + 1 : stop + 1].copy()
        if stop == end:
            tokens[-1:] = self._eod
        return tokens


class MockSentences:
    """10,000 documents of 2 to 24 sentences of 3 to 59 tokens of ``words``.

    As in real text, few words make up most of it: each is the third power of a uniformly distributed number.
    """

    prefix = fingerprint = "mock data"

    def __init__(self, words: range) -> None:
        random = np.random.default_rng(0)
        self.boundaries: NDArray[np.int64] = np.concatenate([[0], random.integers(*_SENTENCES, _TEXTS).cumsum()])
        lengths = random.integers(*_SENTENCE_LENGTHS, int(self.boundaries[-1]))
        self.lengths: NDArray[np.int32] = lengths.astype(np.int32)
        self._ends = np.concatenate([[0], lengths.cumsum()])
        self._words = words

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.boundaries) - 1

    def get(self, index: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Tokens ``[offset, offset + length)`` of a sentence."""
        tokens = self.get_range(index, index + 1)
        return tokens[offset:] if length is None else tokens[offset : offset + length]

    def get_range(self, first: int, stop: int) -> NDArray[Any]:
        """Tokens of sentences ``first`` to ``stop`` (not included), end to end."""
        counting = np.arange(self._ends.item(first), self._ends.item(stop))
        evenly, count = counting * _STRIDE % len(self._words), len(self._words)
        return self._words.start + evenly**3 // count**2
