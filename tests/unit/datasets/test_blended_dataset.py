"""A blend reads each source's samples in the source's own order and reports the mix it gives."""

from __future__ import annotations

from collections import Counter

import pytest

from megatron.core.datasets.blend import interleave
from megatron.core.datasets.blended_dataset import BlendedDataset, SourceShare
from megatron.core.datasets.gpt_samples import GPTDataset, SampleLayout
from megatron.core.datasets.index_cache import IndexCache
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.sample_order import EpochOrder
from tests.unit.datasets.conftest import WriteDocuments


@pytest.fixture
def blend(write_documents: WriteDocuments) -> BlendedDataset:
    """Ones and twos, three to one, over several epochs of both."""
    mixed = interleave([3, 1], size=200)
    sources = []
    for token, count in zip((1, 2), mixed.counts):
        documents = IndexedDataset(write_documents([[token] * 90] * 3, f"source{token}"))
        order = EpochOrder(documents.lengths, seed=1, seq_length=8, num_samples=int(count), cache=IndexCache(None))
        sources.append(GPTDataset(documents, order, layout=SampleLayout(seq_length=8, eod=50)))
    return BlendedDataset(sources, mixed, weights=[3, 1])


def test_samples_come_from_their_sources(blend: BlendedDataset) -> None:
    """Three quarters are ones; the origin names the source that the tokens come from."""
    assert len(blend) == 200
    tokens = [blend[index]["tokens"][0].item() for index in range(200)]
    assert Counter(tokens) == {1: 150, 2: 50}
    for index in (0, 1, 2, 3, 199):
        assert f"source{tokens[index]}, document " in blend.origin(index)


def test_asked_and_realised_shares(blend: BlendedDataset) -> None:
    """What the user asked for stands beside what the samples are."""
    first, second = (source.documents.prefix for source in blend.sources)
    assert blend.shares == [SourceShare(first, 0.75, 0.75, 150), SourceShare(second, 0.25, 0.25, 50)]
    assert blend.describe()[1] == f"25.000% of the blend (asked 25.000%) from {second}: 50 samples, 1.52 epochs"


def test_outside_the_blend(blend: BlendedDataset) -> None:
    """None fills a batch; anything else that is no sample number is an error."""
    assert blend[None]["loss_mask"].sum() == 0
    for index in (-1, 200):
        with pytest.raises(IndexError, match=f"sample {index} of a blend of 200"):
            blend[index]
