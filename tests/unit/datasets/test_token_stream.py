"""Samples of consecutive tokens, for families that read them without labels."""

from __future__ import annotations

import numpy as np
from typing_extensions import override

from megatron.config.data import DataConfig
from megatron.core.datasets.build import Part, Source
from megatron.core.datasets.index_cache import IndexCache
from megatron.core.datasets.mock import MockDocuments
from megatron.core.datasets.samples import Sample
from megatron.core.datasets.token_stream import StreamDataset, stream_order


class Consecutive(StreamDataset):
    """Samples of five tokens, and how many of them are real."""

    @override
    def sample(self, index: int) -> Sample:
        """Tokens where the order says."""
        tokens, count = self.read(index, 5)
        return {"tokens": tokens, "count": np.array(count)}


def test_samples_without_labels_divide_the_stream() -> None:
    """A family whose samples aren't pairs of token and label had to take GPT's, of which neighbours share a token."""
    documents = MockDocuments(eod=9, vocab_size=10)
    units = range(3, 7)
    part = Part(Source(documents, IndexCache(None), ids_known=True), "train", units, copy=0)
    order = stream_order(part, DataConfig(seq_length=99), seed=1, seq_length=5, num_samples=None)
    samples = Consecutive(documents, order, first=units.start)
    assert all(samples[index]["count"] == 5 for index in range(len(samples)))
    total = sum(documents.lengths[each] for each in units)
    assert len(samples) == (total - 1) // 5
    found = np.bincount(np.concatenate([samples[index]["tokens"] for index in range(len(samples))]), minlength=10)
    held = np.bincount(np.concatenate([documents.get(each) for each in units]), minlength=10)
    assert (found <= held).all()
    assert held.sum() - found.sum() == total - 5 * len(samples) <= 5
