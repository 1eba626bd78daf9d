"""Labelled samples for BERT: pairs of texts, each once, or in epochs for training."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.index_build import random_state
from megatron.core.datasets.index_cache import digest_of
from megatron.core.datasets.sample_order import RecentEpochs
from megatron.core.datasets.samples import Sample
from megatron.core.tokenizers.base import MaskingTokenizer
from megatron.errors import DataError
from tasks.fine_tuning.files import LabelledTexts

NO_LABEL = -1


@dataclass(frozen=True)
class PairLayout:
    """``[CLS] A [SEP] B [SEP]`` in ``seq_length`` tokens; a longer pair is cut before the last [SEP].

    Between the texts are as many [SEP] as the tokenizer has there. ``longest_first``: maximum number of tokens of A.
    """

    seq_length: int
    tokenizer: MaskingTokenizer
    longest_first: int | None = None

    def sequence(self, first: str, second: str) -> NDArray[np.int64]:
        """Ids, types (1 for B and its [SEP]) and attention mask (1: no padding): [3, S]."""
        tokenizer, room = self.tokenizer, self.seq_length - 1
        one, two = tokenizer.tokenize_parts([first, second])
        one = one[: self.longest_first]
        head = [tokenizer.cls, *one, *[tokenizer.sep] * tokenizer.separators]
        whole = [*head, *two][:room]
        found = np.zeros((3, self.seq_length), np.int64)
        found[0] = tokenizer.pad or 0
        size = len(whole) + 1
        found[0, :size] = [*whole, tokenizer.sep]
        found[1, min(len(head), room) : size] = 1
        found[2, :size] = 1
        return found


class LabelledDataset:
    """The texts of a set, in their order.

    A sample: ``text``, ``types`` and ``attention_mask`` int64 [choices, S]; ``label``: the right class or choice, or −1
    for a sample without loss; ``number``: of the sample, from ``first_number`` on, or −1 for one that pads a batch.
    """

    def __init__(self, texts: LabelledTexts, layout: PairLayout, *, first_number: int = 0) -> None:
        self._texts, self._layout, self._first_number = texts, layout, first_number

    @property
    def prefix(self) -> str:
        """The source's name for messages."""
        return self._texts.source

    @property
    def digest(self) -> str:
        """Hex digest of the files and of how samples are cut."""
        return digest_of("labelled", self._texts.digest, self._layout.seq_length, self._layout.longest_first)

    def __len__(self) -> int:
        return len(self._texts.texts)

    def __getitem__(self, index: int | None) -> Sample:
        text = self._texts.texts[index or 0]
        try:
            sequences = np.stack([self._layout.sequence(*pair) for pair in text.pairs])
        except DataError as error:
            raise DataError(f"{text.origin}: {error}") from None
        label = NO_LABEL if index is None or text.label is None else text.label
        number = NO_LABEL if index is None else self._first_number + index
        ids, types, attention_mask = sequences.transpose(1, 0, 2)
        return {
            "text": ids,
            "types": types,
            "attention_mask": attention_mask,
            "label": np.array(label, np.int64),
            "number": np.array(number, np.int64),
        }

    def origin(self, index: int) -> str:
        """File and line of a sample."""
        return self._texts.texts[index].origin

    def describe(self) -> list[str]:
        """The source, in a line."""
        return [self._texts.describe()]

    def with_samples(self, num_samples: int) -> LabelledDataset:
        """The first ``num_samples`` samples; after the last one they repeat."""
        texts = list(itertools.islice(itertools.cycle(self._texts.texts), num_samples))
        return LabelledDataset(replace(self._texts, texts=texts), self._layout)

    def prepare(self) -> None:
        """There are no indices."""


class EpochsDataset:
    """Every sample once in each epoch, in another random order each time.

    An epoch is a whole number of batches: the last one is padded with samples without loss. So no sample is dropped,
    and no batch has samples of two epochs.
    """

    def __init__(self, samples: LabelledDataset, *, epochs: int, batch: int, seed: int) -> None:
        self._samples, self._epochs, self._batch, self._seed = samples, epochs, batch, seed
        self._orders = RecentEpochs(self._order)

    @property
    def prefix(self) -> str:
        """The source's name for messages."""
        return self._samples.prefix

    @property
    def digest(self) -> str:
        """Hex digest of the samples and their order, without the number of epochs."""
        return digest_of("epochs", self._samples.digest, self._batch, self._seed)

    def __len__(self) -> int:
        return self._epochs * self._stride

    @property
    def _stride(self) -> int:
        """Samples of an epoch, padding included."""
        return batches_of_an_epoch(len(self._samples), self._batch) * self._batch

    def __getitem__(self, index: int | None) -> Sample:
        return self._samples[None if index is None else self._find(index)]

    def _find(self, index: int) -> int | None:
        """The sample at a place of the stream; None for padding."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {self._epochs} epochs, which have {len(self)} places")
        epoch, place = divmod(index, self._stride)
        if place >= len(self._samples):
            return None
        return self._orders[epoch].item(place)

    def _order(self, epoch: int) -> NDArray[np.int64]:
        return random_state(self._seed, epoch).permutation(len(self._samples))

    def origin(self, index: int) -> str:
        """File and line of a sample."""
        found = self._find(index)
        return "padding of a batch" if found is None else self._samples.origin(found)

    def describe(self) -> list[str]:
        """The source and how often it is read, in a line."""
        return [f"{line}; {self._epochs} epochs" for line in self._samples.describe()]

    def with_samples(self, num_samples: int) -> EpochsDataset:
        """Raise DataError: a run that continues with other data would not have whole epochs."""
        raise DataError(
            f"the checkpoint's run trained on other files than {self.prefix}, or with another --seq-length, --seed "
            "or --global-batch-size, and cannot continue in the middle of an epoch: give its values, or --finetune "
            "to start again from its weights"
        )

    def prepare(self) -> None:
        """There are no indices."""


def batches_of_an_epoch(samples: int, batch: int) -> int:
    """Number of batches with every sample once; the last one may be padded."""
    return -(-samples // batch)
