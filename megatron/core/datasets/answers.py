"""Samples of answers that a model has generated: a prompt with its answer, and what is known of it by then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron.core.datasets.index_cache import digest_of
from megatron.core.datasets.samples import TEXT_LENGTH, Sample

ADVANTAGE, SHARE, COUNT, REWARD, SPREAD, IS_ANSWER = (
    "advantage",
    "loss_share",
    "loss_count",
    "reward",
    "reward_spread",
    "is_answer",
)
"""Fields of a sample: the answer's advantage, what the loss of each of its tokens is multiplied by and what the sum of
losses is divided by, its reward, the standard deviation of its group's, and whether it has a reward."""
OLD, REFERENCE, PLACE = "old_log_probs", "reference_log_probs", "table_place"
"""Fields of labels: log-probabilities when the answer was generated (NaN: those of now) and of the initial model, and
the place in a table of all answers' labels."""
OF_SAMPLES, OF_LABELS = (ADVANTAGE, SHARE, COUNT, REWARD, SPREAD, IS_ANSWER), (OLD, REFERENCE, PLACE)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer: ``tokens`` [n] of the prompt, which are the first ``prompt_length``, and of the answer.

    ``reward``: NaN for none. ``loss_share``, ``loss_count``: the fields of that name. ``old``, ``reference``: float64
    [n - prompt_length], or None.
    """

    tokens: NDArray[np.int64]
    prompt_length: int
    reward: float
    spread: float
    advantage: float
    loss_share: float
    loss_count: float
    old: NDArray[np.float64] | None = None
    reference: NDArray[np.float64] | None = None

    @property
    def length(self) -> int:
        """Tokens of the answer."""
        return len(self.tokens) - self.prompt_length

    def sample(self, number: int, length: int) -> Sample:
        """The answer, number ``number`` of all, as a sample of ``length`` pairs of a token and its label: text and
        padding, which is another document.
        """
        stop, start = len(self.tokens) - 1, self.prompt_length - 1
        tokens, labels, position_ids = np.zeros((3, length), np.int64)
        tokens[:stop], labels[:stop], position_ids[:stop] = self.tokens[:-1], self.tokens[1:], np.arange(stop)
        mask, document_ids = np.zeros(length, np.float32), np.ones(length, np.int32)
        mask[start:stop], document_ids[:stop] = 1.0, 0
        scores = {OLD: (self.old, np.nan), REFERENCE: (self.reference, 0.0)}
        of_labels = {name: np.full(length, empty) for name, (_, empty) in scores.items()}
        for name, (values, _) in scores.items():
            if values is not None:
                of_labels[name][start:stop] = values
        is_rated = not np.isnan(self.reward)
        known = {
            ADVANTAGE: self.advantage,
            SHARE: self.loss_share,
            COUNT: self.loss_count,
            REWARD: self.reward if is_rated else 0.0,
            SPREAD: self.spread if is_rated else 0.0,
            IS_ANSWER: float(is_rated),
        }
        return {
            "tokens": tokens,
            "labels": labels,
            "loss_mask": mask,
            "position_ids": position_ids,
            "document_ids": document_ids,
            TEXT_LENGTH: np.array(stop, np.int64),
            PLACE: number * length + np.arange(length),
            **of_labels,
            **{name: np.array(value, np.float64) for name, value in known.items()},
        }


def batch_of(answers: Sequence[Answer], numbers: Sequence[int], length: int) -> dict[str, Tensor]:
    """Answers by their numbers, as a batch of samples of ``length`` labels."""
    samples = [answers[number].sample(number, length) for number in numbers]
    return {name: torch.from_numpy(np.stack([sample[name] for sample in samples])) for name in samples[0]}


class MockAnswers:
    """Random answers without a model that gave them, for ``--mock-data``: a ``SourceDataset``.

    ``length``: labels of a sample. ``weigh``: from an answer's length to its ``loss_share`` and ``loss_count``.
    ``has_old``: whether some time has passed since they were generated.
    """

    prefix = "mock answers"

    def __init__(
        self,
        *,
        vocab_size: int,
        length: int,
        seed: int,
        num_samples: int,
        weigh: Callable[[int], tuple[float, float]],
        has_old: bool,
    ) -> None:
        self._vocab_size, self._length, self._seed, self._has_old = vocab_size, length, seed, has_old
        self._num_samples, self._weigh = num_samples, weigh

    @property
    def digest(self) -> str:
        """Hex digest of what determines the samples."""
        return digest_of(self.prefix, self._vocab_size, self._length, self._seed, self._has_old)

    def __len__(self) -> int:
        return self._num_samples

    def answer(self, index: int) -> Answer:
        """Answer ``index``, whose loss is a mean over its tokens."""
        random = np.random.default_rng((self._seed, index))
        prompt = int(random.integers(1, max(self._length // 2, 2)))
        count = int(random.integers(1, self._length + 2 - prompt))
        scores = -random.normal(np.log(self._vocab_size), 0.5, (2, count))
        share, total = self._weigh(count)
        return Answer(
            tokens=random.integers(self._vocab_size, size=prompt + count),
            prompt_length=prompt,
            reward=float(random.integers(2)),
            spread=0.5,
            advantage=float(random.normal()),
            loss_share=share,
            loss_count=total,
            old=scores[0] if self._has_old else None,
            reference=scores[1],
        )

    def __getitem__(self, index: int | None) -> Sample:
        sample = self.answer(index or 0).sample(index or 0, self._length)
        if index is not None:
            return sample
        emptied = ("loss_mask", TEXT_LENGTH, *OF_SAMPLES)
        return sample | {name: np.zeros_like(sample[name]) for name in emptied}

    def origin(self, index: int) -> str:
        """The source, for messages."""
        return f"{self.prefix}, answer {index}"

    def describe(self) -> list[str]:
        """The source, in a line."""
        return [f"{self.prefix}: {len(self):,} samples"]

    def prepare(self) -> None:
        """Do nothing: samples are made when they are read."""

    def with_samples(self, num_samples: int) -> MockAnswers:
        """This data set with another number of samples."""
        found = copy(self)
        found._num_samples = num_samples
        return found
