"""Conversations for fine-tuning that are longer than a sample: they are cut, and some samples have no loss then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from megatron.core.datasets.index_build import Lengths
    from megatron.core.datasets.samples import OrderedDataset

_MOST_TOKENS = 1 << 24
"""About as many tokens are read to count samples without a loss; of more, evenly spaced samples are."""


@dataclass(frozen=True)
class CutDocuments:
    """How many of a split's ``documents`` are longer than a sample of ``seq_length`` tokens and their labels."""

    cut: int
    documents: int
    seq_length: int

    @classmethod
    def of(cls, lengths: Lengths, *, seq_length: int) -> CutDocuments:
        """Count the documents of these lengths."""
        return cls(int(np.count_nonzero(lengths > seq_length + 1)), len(lengths), seq_length)

    def describe(self, dataset: OrderedDataset) -> str:
        """What becomes of them in the samples of ``dataset``, for its line in the report; nothing if there are none."""
        if not self.cut:
            return ""
        samples = min(len(dataset), dataset.order.samples_per_epoch)
        read = np.unique(
            np.linspace(0, samples - 1, min(samples, max(_MOST_TOKENS // self.seq_length, 100)), dtype=int)
        )
        empty = sum(not dataset.sample(index)["loss_mask"].any() for index in read.tolist())
        share = f"{empty:,} of {samples:,}" if len(read) == samples else f"about {empty / len(read):.1%} of {samples:,}"
        return (
            f", {self.cut:,} of {self.documents:,} conversations are longer than --seq-length {self.seq_length} and "
            f"cut, {share} samples have no loss"
        )
