"""Samples of pairs: a chosen and a rejected answer to one prompt, as two documents of one sample.

Files hold a document of two sequences for each pair, the chosen one first, and beside it which tokens are the answer.
Of an answer that is rated alone one of both sequences is empty.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from megatron.config.data import DataConfig
from megatron.config.flags import plural_s
from megatron.core.datasets.build import Source, targets_prefix
from megatron.core.datasets.index_cache import IndexCache
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.samples import Documents, Sample
from megatron.core.datasets.scored import SCORES, ScoredDataset, ScoredDatasets, laid_out
from megatron.core.files.remote_path import path_of
from megatron.errors import DataError

ANSWER, IS_PAIR, NUMBER = "answer", "is_pair", "pair_number"
"""Fields of samples beside a text's and its scores: for each label whether it is of the chosen (1) or rejected (2)
answer or of none (0), whether the sample counts, and its number in the source."""
CHOSEN, REJECTED = 1, 2
TOOL = "tools/preprocess_preferences.py"


class PairDataset(ScoredDataset):
    """Samples of a chosen and a rejected text. Fields are those of ``PackedDataset`` and those named above."""

    what = "pair"

    @override
    def numbered(self, number: int) -> Sample:
        """A pair of the source by its number."""
        sample, answer = laid_out([self.read(2 * number + side) for side in (0, 1)], self._seq_length)
        return {
            **sample,
            ANSWER: answer,
            IS_PAIR: np.array(1.0, np.float32),
            NUMBER: np.array(number, np.int64),
            SCORES: self.scores.values[number],
        }

    @override
    def without_loss(self, sample: Sample) -> Sample:
        """The sample as one that is no pair."""
        emptied = (ANSWER, IS_PAIR, SCORES)
        return super().without_loss(sample) | {name: np.zeros_like(sample[name]) for name in emptied}

    @override
    def origin(self, index: int) -> str:
        """The pair's number."""
        return f"{self.prefix}, {self.name_of(self.order.find(index))}"


class PairDatasets(ScoredDatasets):
    """How pairs are read; ``--split`` counts pairs."""

    kind = PairDataset

    @override
    def mock(self) -> Source:
        """Random texts."""
        return mock_pairs(self._data, vocab_size=self._vocab_size)

    @override
    def count_units(self, documents: Documents) -> int:
        """Number of pairs; DataError where the documents are none."""
        check_two_texts(documents, what="pairs of answers")
        lengths = np.asarray(documents.lengths)
        if alone := np.flatnonzero(lengths == 0)[:1].tolist():
            raise DataError(
                f"{documents.prefix} holds answers that are rated alone, such as document {alone[0] // 2}, and "
                f"--preference-loss compares two: choose kto, or make the data from pairs with {TOOL}"
            )
        return len(lengths) // 2

    @override
    def _lengths(self, documents: Documents) -> NDArray[np.int64]:
        """Both texts of a pair are in one sample."""
        found: NDArray[np.int64] = (np.asarray(documents.lengths, np.int64).reshape(-1, 2) - 1).sum(axis=1)
        return found


def check_two_texts(documents: Documents, *, what: str) -> None:
    """Raise DataError where a document hasn't two texts, as files of ``what`` have."""
    if not isinstance(documents, IndexedDataset):
        return
    sizes = np.diff(documents.boundaries)
    if wrong := np.flatnonzero(sizes != 2)[:1].tolist():
        number = int(sizes[wrong[0]])
        raise DataError(
            f"{documents.prefix} holds no {what}: document {wrong[0]} has {number} text{plural_s(number)} and not 2; "
            f"make the data with {TOOL}, or leave --preference-loss out"
        )


def check_no_pairs(documents: Documents) -> None:
    """Raise DataError for preferences, of whose two texts in a document one may be an answer to unlearn. Documents of
    several sentences, which have no targets, are none.
    """
    if not isinstance(documents, IndexedDataset) or len(documents.lengths) < len(documents.boundaries):
        return  # a text each
    if not path_of(f"{targets_prefix(documents.prefix)}.idx").exists():
        return
    if wrong := np.flatnonzero(np.diff(documents.boundaries) > 1)[:1].tolist():
        raise DataError(
            f"{documents.prefix} holds preferences, and without --preference-loss the answers that are not preferred "
            f"would be learned, too: document {wrong[0]} has two texts; give --preference-loss, or make the data with "
            "tools/preprocess_sft.py"
        )


def mock_pairs(data: DataConfig, *, vocab_size: int) -> Source:
    """Pairs of random texts."""
    texts = MockPairs(vocab_size=vocab_size, longest=data.seq_length // 2 + 1)
    return Source(texts, IndexCache(None), ids_known=True, targets=texts.targets)


class MockPairs:
    """A hundred pairs of random texts of up to ``longest`` tokens, of which about a half is the answer.

    As in preferences, both texts of a pair begin alike.
    """

    prefix = fingerprint = "mock pairs"

    def __init__(self, *, vocab_size: int, longest: int, pairs: int = 100) -> None:
        self._vocab_size, self._longest = vocab_size, longest
        random = np.random.default_rng(0)
        prompts = random.integers(1, max(longest // 2, 1) + 1, pairs)
        self.lengths: NDArray[np.int32] = (
            random.integers(prompts[:, None] + 1, longest + 1, (pairs, 2)).astype(np.int32).reshape(-1)
        )
        self._prompts = np.repeat(prompts, 2)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Tokens ``[offset, offset + length)`` of a text."""
        begin, rest = (
            np.random.default_rng(each).integers(self._vocab_size, size=self._longest)
            for each in (index // 2, len(self.lengths) + index)
        )
        prompt, end = self._prompts.item(index), self.lengths.item(index)
        whole = np.concatenate([begin[:prompt], rest[: end - prompt]])
        return whole[offset : end if length is None else offset + length]

    @cached_property
    def targets(self) -> _MockTargets:
        """Which tokens are the answer."""
        return _MockTargets(self.lengths, self._prompts)


class _MockTargets:
    prefix = fingerprint = "mock pairs"

    def __init__(self, lengths: NDArray[np.int32], prompts: NDArray[np.int64]) -> None:
        self.lengths, self._prompts = lengths, prompts

    def get(self, index: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Whether tokens ``[offset, offset + length)`` of a text are of the answer."""
        whole = np.arange(self.lengths.item(index)) >= self._prompts.item(index)
        return whole[offset : None if length is None else offset + length].astype(np.uint8)
