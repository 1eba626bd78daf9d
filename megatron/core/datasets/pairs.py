"""Samples of pairs: a chosen and a rejected answer to one prompt, as two documents of one sample.

Files hold a document of two sequences for each pair, the chosen one first, and beside it which tokens are the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from megatron.config.data import DataConfig
from megatron.config.flags import plural_s
from megatron.core.datasets.build import Part, ShortSplitError, Source
from megatron.core.datasets.index_build import random_state
from megatron.core.datasets.index_cache import IndexCache, digest_of
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.sample_order import RecentEpochs
from megatron.core.datasets.samples import TEXT_LENGTH, Documents, Order, OrderedDataset, Sample, check_vocabulary
from megatron.core.tokenizers.base import Tokenizer
from megatron.errors import DataError

ANSWER, IS_PAIR, NUMBER, SCORES = "answer", "is_pair", "pair_number", "reference_scores"
"""Fields of samples beside a text's: for each label whether it is of the chosen (1) or rejected (2) answer or of none
(0), whether the sample counts, its number in the source, and two numbers of the pair that were computed before."""
CHOSEN, REJECTED = 1, 2
_TOOL = "tools/preprocess_preferences.py"


class PairOrder(Order):
    """All pairs in a new random order in each epoch. ``numbers``: of the pairs."""

    def __init__(
        self, numbers: NDArray[np.int64], *, digest: str, seed: int, num_samples: int | None, copy: int = 0
    ) -> None:
        super().__init__(digest=digest, samples_per_epoch=len(numbers), num_samples=num_samples)
        self.numbers = numbers
        self._epochs = RecentEpochs(partial(_shuffled, numbers, seed, copy))

    def find(self, index: int) -> int:
        """The number of the pair that sample ``index`` is."""
        epoch, place = divmod(index, self.samples_per_epoch)
        return self._epochs[epoch].item(place)


def _shuffled(numbers: NDArray[np.int64], seed: int, copy: int, epoch: int) -> NDArray[np.int64]:
    return random_state(seed, copy, epoch).permutation(numbers)


class PairScores:
    """Two numbers of each pair of a source, ``values`` float64 [pairs, 2], which are computed before training: NaN
    until then. All data sets of the source share them. ``digest``: of the pairs.
    """

    def __init__(self, pairs: int, digest: str) -> None:
        self.values, self.digest = np.full((pairs, 2), np.nan), digest


class PairDataset(OrderedDataset):
    """Samples of ``seq_length`` pairs of a token and its label, each of a chosen and a rejected text and padding.

    Fields are those of ``PackedDataset`` and those named above. ``targets``: for each token whether it is of an answer.
    ``left_out``: how many pairs are longer than a sample, and ``longest``: the length that takes all.
    """

    order: PairOrder

    def __init__(
        self,
        documents: Documents,
        targets: Documents,
        order: PairOrder,
        *,
        seq_length: int,
        vocab_size: int | None,
        scores: PairScores,
        left_out: int,
        longest: int,
    ) -> None:
        super().__init__(documents, vocab_size=vocab_size)
        self.order, self.scores, self._targets, self._seq_length = order, scores, targets, seq_length
        self._left_out, self._longest = left_out, longest

    @override
    def sample(self, index: int) -> Sample:
        """The pair at this place of the order."""
        return self.pair(self.order.find(index))

    def pair(self, number: int) -> Sample:
        """A pair of the source by its number."""
        length, start = self._seq_length, 0
        tokens, labels, position_ids, answer = np.zeros((4, length), np.int64)
        document_ids = np.full(length, 2, np.int32)
        for side in (0, 1):
            document = 2 * number + side
            read = self.documents.get(document).astype(np.int64)
            if self._vocab_size is not None:
                check_vocabulary(read, self._vocab_size, documents=self.documents, document=document, offset=0)
            count = len(read) - 1
            stop = start + count
            tokens[start:stop], labels[start:stop] = read[:-1], read[1:]
            position_ids[start:stop] = np.arange(count)
            answer[start:stop] = (CHOSEN, REJECTED)[side] * (self._targets.get(document)[1:] != 0)
            document_ids[start:stop] = side
            start = stop
        return {
            "tokens": tokens,
            "labels": labels,
            "loss_mask": (answer > 0).astype(np.float32),
            "position_ids": position_ids,
            "document_ids": document_ids,
            TEXT_LENGTH: np.array(start, np.int64),
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
        return f"{self.prefix}, pair {self.order.find(index)}"

    @override
    def describe(self) -> list[str]:
        """The source, in a line, and how many pairs are left out."""
        cut = ""
        if self._left_out:
            pairs = self._left_out + self.order.samples_per_epoch
            cut = (
                f"; {self._left_out:,} of {pairs:,} pairs are left out, as they are longer than --seq-length "
                f"{self._seq_length} ({self._longest} takes all)"
            )
        return [f"{line}{cut}" for line in super().describe()]


class PairDatasets:
    """How pairs are read; ``--split`` counts pairs. ``datasets``: those that were built."""

    def __init__(self, data: DataConfig, *, seed: int, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._data, self._seed, self._vocab_size, self._eod = data, seed, vocab_size, tokenizer.eod
        self._scores = dict[str, PairScores]()
        self.datasets: list[PairDataset] = []

    def mock(self) -> Source:
        """Random texts."""
        texts = MockPairs(vocab_size=self._vocab_size, longest=self._data.seq_length // 2 + 1)
        return Source(texts, IndexCache(None), ids_known=True, targets=texts.targets)

    def count_units(self, documents: Documents) -> int:
        """Number of pairs; DataError where the documents are none."""
        if isinstance(documents, IndexedDataset):
            sizes = np.diff(documents.boundaries)
            if wrong := np.flatnonzero(sizes != 2)[:1].tolist():
                number = int(sizes[wrong[0]])
                raise DataError(
                    f"{documents.prefix} holds no pairs of answers: document {wrong[0]} has {number} "
                    f"text{plural_s(number)} and not 2; make the data with {_TOOL}, or leave --preference-loss out"
                )
        return len(documents.lengths) // 2

    def dataset(self, part: Part, num_samples: int | None, *, remedy: str) -> PairDataset:
        """The pairs of a part that fit; raises ShortSplitError when there are none."""
        documents, targets, length = part.source.documents, part.source.targets, self._data.seq_length
        assert targets is not None, "--preference-loss reads which tokens are answers"
        lengths = np.asarray(documents.lengths, np.int64).reshape(-1, 2)
        needed = (lengths - 1).sum(axis=1)[part.units.start : part.units.stop]
        numbers = part.units.start + np.flatnonzero(needed <= length)
        if not len(numbers):
            longest = f", all longer than --seq-length {length} (the shortest takes {needed.min()})"
            raise ShortSplitError(
                f"{documents.prefix}: the {part.split} split has {len(needed)} pairs{longest if len(needed) else ''}: "
                f"give {'a larger --seq-length' if len(needed) else remedy}"
            )
        if documents.prefix not in self._scores:
            digest = digest_of("pairs", documents.lengths, documents.fingerprint, targets.fingerprint)
            self._scores[documents.prefix] = PairScores(len(lengths), digest)
        order = PairOrder(
            numbers,
            digest=digest_of("pairs", lengths, self._seed, part.copy, length, [part.units.start, part.units.stop]),
            seed=self._seed,
            num_samples=num_samples,
            copy=part.copy,
        )
        found = PairDataset(
            documents,
            targets,
            order,
            seq_length=length,
            vocab_size=None if part.source.ids_known else self._vocab_size,
            scores=self._scores[documents.prefix],
            left_out=len(needed) - len(numbers),
            longest=int(needed.max()),
        )
        self.datasets.append(found)
        return found


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


def unique_pairs(datasets: Sequence[PairDataset]) -> list[tuple[PairDataset, NDArray[np.int64]]]:
    """For each source a data set that reads it, and the numbers of all pairs that some of ``datasets`` read."""
    found = dict[int, tuple[PairDataset, list[NDArray[np.int64]]]]()
    for each in datasets:
        found.setdefault(id(each.scores), (each, []))[1].append(each.order.numbers)
    return [(dataset, np.unique(np.concatenate(numbers))) for dataset, numbers in found.values()]
