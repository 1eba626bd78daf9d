"""Samples of answers that are rated alone, as desirable or not: KTO's, and what its baseline is computed from.

Files are those of pairs, in whose documents one of both sequences is empty: the first of an undesirable answer, the
second of a desirable one. Of a pair both answers are samples.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from megatron.config.data import DataConfig
from megatron.core.datasets.build import Source
from megatron.core.datasets.index_build import random_state
from megatron.core.datasets.pairs import TOOL, check_two_texts, mock_pairs
from megatron.core.datasets.samples import TEXT_LENGTH, Documents, Sample
from megatron.core.datasets.scored import SCORES, ScoredDataset, ScoredDatasets, Text, laid_out
from megatron.errors import DataError

LABEL, PLACE = "label", "score_place"
"""Fields of samples beside a text's and its scores: whether the answer is desirable (1) or not (2) or the sample none
(0), and the place of its log-probability in the table of scores."""
DESIRABLE, UNDESIRABLE = 1, 2
_MOST = 4 / 3
"""How much more desirable answers may weigh in all, by KTO's authors."""
MISMATCHED = "mismatched_"
"""How the names of a sample's fields begin that are of its prompt with another sample's answer."""


class RatedDataset(ScoredDataset):
    """Samples of one answer each, and of its prompt with another answer (``MISMATCHED``).

    A sample's number is that of its sequence. Answers go around a ring of all samples of the source in random order,
    which is always the same, so scores of the initial model hold for every epoch. ``partners``: for each number that
    with the other answer; None where no loss needs it.
    """

    what = "rated answer"
    partners: NDArray[np.int64] | None = None

    @property
    @override
    def parts(self) -> int:
        """The answer, and the other one behind the prompt."""
        return 1 if self.partners is None else 2

    @override
    def numbered(self, number: int) -> Sample:
        """An answer by its number."""
        sample = self._of(self.read(number), number, part=0)
        if self.partners is None:
            return sample
        other = self._of(self._mismatched(number), number, part=1)
        return {**sample, **{f"{MISMATCHED}{name}": other[name] for name in _fields_of_text(other)}}

    @override
    def to_score(self, number: int, part: int) -> Sample:
        """The answer, or the other one behind its prompt."""
        return self._of(self._mismatched(number) if part else self.read(number), number, part=part)

    @override
    def without_loss(self, sample: Sample) -> Sample:
        """The sample as one that is no answer."""
        emptied = (LABEL, SCORES, *(f"{MISMATCHED}{name}" for name in ("loss_mask", TEXT_LENGTH)))
        return super().without_loss(sample) | {name: np.zeros_like(sample[name]) for name in emptied if name in sample}

    @override
    def origin(self, index: int) -> str:
        """The number of the document."""
        return f"{self.prefix}, {self.name_of(self.order.find(index))}"

    @override
    def name_of(self, number: int) -> str:
        """The number of the document."""
        return f"{self.what} {number // 2}"

    def _of(self, text: Text, number: int, *, part: int) -> Sample:
        sample, _ = laid_out([text], self._seq_length)
        return {
            **sample,
            LABEL: np.array((DESIRABLE, UNDESIRABLE)[number % 2], np.int64),
            PLACE: np.array(2 * number + part, np.int64),
            SCORES: self.scores.values[number],
        }

    def _mismatched(self, number: int) -> Text:
        """The sample's prompt with another answer, cut where it is longer than a sample."""
        assert self.partners is not None
        own, other = self.read(number), self.read(self.partners.item(number))
        prompt, answer = int(np.argmax(own.is_answer)), int(np.argmax(other.is_answer))
        parts = zip((own.ids[:prompt], own.is_answer[:prompt]), (other.ids[answer:], other.is_answer[answer:]))
        ids, is_answer = (np.concatenate(each)[: self._seq_length + 1] for each in parts)
        return Text(ids, is_answer)


def _fields_of_text(sample: Sample) -> list[str]:
    return [name for name in sample if name not in (LABEL, PLACE, SCORES)]


class RatedDatasets(ScoredDatasets):
    """How rated answers are read; ``--split`` counts documents. ``mismatched``: whether the loss needs other answers
    behind each prompt.
    """

    kind = RatedDataset
    per_document = 2

    def __init__(self, data: DataConfig, *, seed: int, vocab_size: int, mismatched: bool) -> None:
        super().__init__(data, seed=seed, vocab_size=vocab_size)
        self._mismatched = mismatched

    @override
    def mock(self) -> Source:
        """Random texts."""
        return mock_pairs(self._data, vocab_size=self._vocab_size)

    @override
    def count_units(self, documents: Documents) -> int:
        """Number of documents; DataError where they are no rated answers."""
        check_two_texts(documents, what="rated answers")
        lengths = np.asarray(documents.lengths)
        if self._mismatched and np.count_nonzero(lengths) < 2:
            raise DataError(
                f"{documents.prefix} holds only one rated answer, and --preference-loss kto needs another one for its "
                f"baseline: give more lines to {TOOL}, or choose apo_zero_unpaired"
            )
        return len(lengths) // 2

    @override
    def _lengths(self, documents: Documents) -> NDArray[np.int64]:
        """Every sequence that isn't empty is a sample."""
        return np.maximum(np.asarray(documents.lengths, np.int64) - 1, 0)

    @override
    def _settings(self, documents: Documents) -> tuple[object, ...]:
        """Other answers are cut at the end of a sample."""
        return (self._data.seq_length,) if self._mismatched else ("no other answers",)

    @override
    def _completed(self, found: ScoredDataset) -> ScoredDataset:
        if self._mismatched:
            assert isinstance(found, RatedDataset)
            lengths = np.asarray(found.documents.lengths)
            found.partners = _ring(np.flatnonzero(lengths), len(lengths))
        return found


def _ring(numbers: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """For each of ``numbers`` the one before it in a random order that is always the same, int64 [size]."""
    order, found = random_state(0, len(numbers)).permutation(numbers), np.full(size, -1, np.int64)
    found[order] = np.roll(order, 1)
    return found


def labels_of(documents: Documents) -> tuple[int, int]:
    """How many answers of a source are desirable, and how many are not."""
    lengths = np.asarray(documents.lengths)
    return int(np.count_nonzero(lengths[::2])), int(np.count_nonzero(lengths[1::2]))


def describe_labels(labels: tuple[int, int], weights: tuple[float, float] = (1.0, 1.0)) -> str:
    """Numbers of desirable and of undesirable answers, and a remark if their weights don't make up for a difference
    (equation 8 of arXiv:2402.01306).
    """
    found = f"{labels[0]:,} desirable and {labels[1]:,} undesirable answers"
    if not all(labels):
        return f"{found}; remark: all have the same label, so nothing says what to prefer"
    good, bad = (number * weight for number, weight in zip(labels, weights))
    if bad <= good <= bad * _MOST:
        return found
    flag, low, high = "--undesirable-weight", good / labels[1] / _MOST, good / labels[1]
    if good < bad:
        flag, low, high = "--desirable-weight", bad / labels[0], bad / labels[0] * _MOST
    return f"{found}; remark: weights that make up for the difference are {flag} {low:.2f} to {high:.2f}"
