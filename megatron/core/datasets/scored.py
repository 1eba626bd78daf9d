"""Samples that the initial model scores before training: what data sets of pairs and of rated answers share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from megatron.config.data import DataConfig
from megatron.core.datasets.build import Part, ShortSplitError, Source
from megatron.core.datasets.index_build import random_state
from megatron.core.datasets.index_cache import digest_of
from megatron.core.datasets.sample_order import RecentEpochs
from megatron.core.datasets.samples import TEXT_LENGTH, Documents, Order, OrderedDataset, Sample, check_vocabulary

SCORES = "reference_scores"
"""A field of samples: two numbers that were computed before training, float64."""


class NumberedOrder(Order):
    """All samples in a new random order in each epoch. ``numbers``: of the samples in their source."""

    def __init__(
        self, numbers: NDArray[np.int64], *, digest: str, seed: int, num_samples: int | None, copy: int = 0
    ) -> None:
        super().__init__(digest=digest, samples_per_epoch=len(numbers), num_samples=num_samples)
        self.numbers = numbers
        self._epochs = RecentEpochs(partial(_shuffled, numbers, seed, copy))

    def find(self, index: int) -> int:
        """The number in the source of what sample ``index`` is."""
        epoch, place = divmod(index, self.samples_per_epoch)
        return self._epochs[epoch].item(place)


def _shuffled(numbers: NDArray[np.int64], seed: int, copy: int, epoch: int) -> NDArray[np.int64]:
    return random_state(seed, copy, epoch).permutation(numbers)


class Scores:
    """Two numbers of each sample of a source, ``values`` float64 [samples, 2], which are computed before training: NaN
    until then. All data sets of the source share them. ``digest``: of the samples.
    """

    def __init__(self, samples: int, digest: str) -> None:
        self.values, self.digest = np.full((samples, 2), np.nan), digest


class ScoredDataset(OrderedDataset):
    """Samples of ``seq_length`` pairs of a token and its label, each of whole texts and padding.

    ``targets``: for each token whether it is of an answer. ``left_out``: how many samples are longer, and ``longest``:
    the length that takes all. ``what``: samples are called so.
    """

    order: NumberedOrder
    what: str

    def __init__(
        self,
        documents: Documents,
        targets: Documents,
        order: NumberedOrder,
        *,
        seq_length: int,
        vocab_size: int | None,
        scores: Scores,
        left_out: int,
        longest: int,
    ) -> None:
        super().__init__(documents, vocab_size=vocab_size)
        self.order, self.scores, self._targets, self._seq_length = order, scores, targets, seq_length
        self._left_out, self._longest = left_out, longest

    @property
    def parts(self) -> int:
        """How many samples a sample's scores are computed from."""
        return 1

    @abstractmethod
    def numbered(self, number: int) -> Sample:
        """A sample by its number in the source."""

    def to_score(self, number: int, part: int) -> Sample:
        """What the log-probabilities of a sample's texts are computed from, one of ``parts`` samples; by default the
        sample itself, which has both texts.
        """
        return self.numbered(number)

    def name_of(self, number: int) -> str:
        """A sample of the source in words."""
        return f"{self.what} {number}"

    @override
    def sample(self, index: int) -> Sample:
        """The sample at this place of the order."""
        return self.numbered(self.order.find(index))

    @override
    def describe(self) -> list[str]:
        """The source, in a line, and how many samples are left out."""
        cut = ""
        if self._left_out:
            number = self._left_out + self.order.samples_per_epoch
            cut = (
                f"; {self._left_out:,} of {number:,} {self.what}s are left out, as they are longer than --seq-length "
                f"{self._seq_length} ({self._longest} takes all)"
            )
        return [f"{line}{cut}" for line in super().describe()]

    def read(self, sequence: int) -> Text:
        """A sequence of the source, and which of its tokens are of an answer."""
        ids = self.documents.get(sequence).astype(np.int64)
        if self._vocab_size is not None:
            check_vocabulary(ids, self._vocab_size, documents=self.documents, document=sequence, offset=0)
        return Text(ids, self._targets.get(sequence) != 0)


class Text(NamedTuple):
    """Ids of a text, and for each whether it is of the answer."""

    ids: NDArray[np.int64]
    is_answer: NDArray[np.bool_]


def laid_out(texts: Sequence[Text], length: int) -> tuple[Sample, NDArray[np.int64]]:
    """The fields of ``PackedDataset`` for whole texts one after the other, none of which attends to another, and
    padding; and for each label the number of its text, counted from 1, if it is of the answer, else 0.
    """
    tokens, labels, position_ids, answer = np.zeros((4, length), np.int64)
    document_ids, start = np.full(length, len(texts), np.int32), 0
    for number, text in enumerate(texts):
        stop = start + len(text.ids) - 1
        tokens[start:stop], labels[start:stop] = text.ids[:-1], text.ids[1:]
        position_ids[start:stop] = np.arange(stop - start)
        answer[start:stop] = (number + 1) * text.is_answer[1:]
        document_ids[start:stop] = number
        start = stop
    fields: dict[str, NDArray[Any]] = {
        "tokens": tokens,
        "labels": labels,
        "loss_mask": (answer > 0).astype(np.float32),
        "position_ids": position_ids,
        "document_ids": document_ids,
        TEXT_LENGTH: np.array(start, np.int64),
    }
    return fields, answer


class ScoredDatasets(ABC):
    """How such samples are read; ``--split`` counts documents. ``datasets``: those that were built.

    ``kind``: of the data sets. ``per_document``: how many numbers of samples a document has.
    """

    kind: type[ScoredDataset]
    per_document: int = 1

    def __init__(self, data: DataConfig, *, seed: int, vocab_size: int) -> None:
        self._data, self._seed, self._vocab_size = data, seed, vocab_size
        self._scores = dict[str, Scores]()
        self.datasets: list[ScoredDataset] = []

    @abstractmethod
    def mock(self) -> Source:
        """Mock data."""

    @abstractmethod
    def count_units(self, documents: Documents) -> int:
        """Number of documents; DataError where they are none of this kind."""

    @abstractmethod
    def _lengths(self, documents: Documents) -> NDArray[np.int64]:
        """Labels of each sample of a source, as many for each document; 0 where a number has no sample."""

    def _settings(self, documents: Documents) -> tuple[object, ...]:
        """What scores depend on besides the documents."""
        return ()

    def dataset(self, part: Part, num_samples: int | None, *, remedy: str) -> ScoredDataset:
        """The samples of a part that fit; raises ShortSplitError when there are none."""
        documents, targets, length = part.source.documents, part.source.targets, self._data.seq_length
        assert targets is not None, "--preference-loss reads which tokens are answers"
        needed, what = self._lengths(documents), self.kind.what
        start, stop = (place * self.per_document for place in (part.units.start, part.units.stop))
        here = needed[start:stop]
        present = here[here > 0]
        numbers = start + np.flatnonzero((here > 0) & (here <= length))
        if not len(numbers):
            longest = f", all longer than --seq-length {length} (the shortest takes {present.min(initial=1 << 62)})"
            raise ShortSplitError(
                f"{documents.prefix}: the {part.split} split has {len(present)} {what}s"
                f"{longest if len(present) else ''}: give {'a larger --seq-length' if len(present) else remedy}"
            )
        if documents.prefix not in self._scores:
            settings, tokens = self._settings(documents), (documents.fingerprint, targets.fingerprint)
            digest = digest_of(f"{what}s", documents.lengths, *tokens, *settings)
            self._scores[documents.prefix] = Scores(len(needed), digest)
        order = NumberedOrder(
            numbers,
            digest=digest_of(f"{what}s", needed, self._seed, part.copy, length, [part.units.start, part.units.stop]),
            seed=self._seed,
            num_samples=num_samples,
            copy=part.copy,
        )
        found = self.kind(
            documents,
            targets,
            order,
            seq_length=length,
            vocab_size=None if part.source.ids_known else self._vocab_size,
            scores=self._scores[documents.prefix],
            left_out=len(present) - len(numbers),
            longest=int(present.max()),
        )
        self.datasets.append(self._completed(found))
        return found

    def _completed(self, found: ScoredDataset) -> ScoredDataset:
        """The data set with what those of this kind have besides; by default nothing."""
        return found


def unique_samples(datasets: Sequence[ScoredDataset]) -> list[tuple[ScoredDataset, NDArray[np.int64]]]:
    """For each source a data set that reads it, and the numbers of all samples that some of ``datasets`` read."""
    found = dict[int, tuple[ScoredDataset, list[NDArray[np.int64]]]]()
    for each in datasets:
        found.setdefault(id(each.scores), (each, []))[1].append(each.order.numbers)
    return [(dataset, np.unique(np.concatenate(numbers))) for dataset, numbers in found.values()]
