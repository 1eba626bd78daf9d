"""A blend reads each source's samples in the source's own order and reports the mix it gives."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.datasets.blend import interleave, normalized
from megatron.core.datasets.blended_dataset import (
    BlendedDataset,
    MixedDataset,
    MixedSource,
    Phase,
    continue_phases,
    mix_of,
    next_phases,
    samples_taken,
)
from megatron.core.datasets.index_cache import IndexCache
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.sample_order import EpochOrder
from megatron.core.models.gpt.data import GPTDataset, SampleLayout
from megatron.errors import CheckpointError
from megatron.small_files import as_kind
from tests.harness.sentences import check_sentence, expect_error
from tests.tiers import examples
from tests.unit.datasets.conftest import WriteDocuments


@pytest.fixture
def blend(write_documents: WriteDocuments) -> BlendedDataset:
    """Ones and twos, three to one, over several epochs of both."""
    mixed = interleave(normalized([3, 1]), size=200)
    sources = []
    for token, count in zip((1, 2), mixed.counts):
        documents = IndexedDataset(write_documents([[token] * 90] * 3, f"source{token}"))
        order = EpochOrder(documents.lengths, seed=1, seq_length=8, num_samples=int(count), cache=IndexCache(None))
        sources.append(GPTDataset(documents, order, layout=SampleLayout(seq_length=8, eod=50)))
    return BlendedDataset(sources, mixed, shares=[0.75, 0.25])


def test_samples_come_from_their_sources(blend: BlendedDataset) -> None:
    """Three quarters are ones; the origin names the source that the tokens come from."""
    assert len(blend) == 200
    tokens = [blend[index]["tokens"][0].item() for index in range(200)]
    assert Counter(tokens) == {1: 150, 2: 50}
    for index in (0, 1, 2, 3, 199):
        check_sentence(blend.origin(index), f"source{tokens[index]}")


def test_asked_and_realised_shares(blend: BlendedDataset) -> None:
    """What the user asked for stands beside what the samples are."""
    first, second = (source.prefix for source in blend.sources)
    assert blend.describe() == [
        f"75.000% of the blend (asked 75.000%) from {first}: 150 samples, 4.55 epochs",
        f"25.000% of the blend (asked 25.000%) from {second}: 50 samples, 1.52 epochs",
    ]


def test_outside_the_blend(blend: BlendedDataset) -> None:
    """None fills a batch; anything else that is no sample number is an error."""
    assert blend[None]["loss_mask"].sum() == 0
    for index in (-1, 200):
        with expect_error(IndexError, index, "200"):
            blend[index]


def test_what_a_mix_took_is_counted_as_it_was_taken() -> None:
    """With weights .6 .3 .1 a changed mix skipped or repeated a sample: counts followed weights normalized twice."""
    shares = normalized([0.6, 0.3, 0.1])
    phases = [Phase(0, tuple(MixedSource(str(place), "", share) for place, share in enumerate(shares)))]
    choices = interleave(shares, size=100).choices
    for until in range(100):
        taken = samples_taken(phases, until=until)
        assert [taken[str(place)] for place in range(3)] == np.bincount(choices[:until], minlength=3).tolist()


def changing(blend: BlendedDataset, *mixes: tuple[int, list[float]]) -> list[MixedDataset]:
    """Training data of a run after each change of its mix: the sample at which it changed, and the new weights."""
    phases, found = [Phase(0, tuple(blend.mix))], list[MixedDataset]([blend])
    for consumed, weights in mixes:
        shares = normalized(weights)
        asked = BlendedDataset(blend.sources, interleave(shares, size=200), shares=shares)
        phases = next_phases(phases, asked.mix, consumed=consumed)
        found.append(
            continue_phases(
                asked,
                as_kind(
                    json.loads(json.dumps([p.to_json() for p in phases])), list[Phase], where="x", error=CheckpointError
                ),
            )
        )
    return found


def test_a_changed_mix_neither_skips_nor_repeats(blend: BlendedDataset) -> None:
    """Each source goes on at its own next sample, over two changes of the weights."""
    stages = changing(blend, (30, [1, 1]), (70, [1, 4]))
    read = [stages[0].origin(i) for i in range(30)]
    read += [stages[1].origin(i) for i in range(30, 70)]
    read += [stages[2].origin(i) for i in range(70, 200)]
    for source in blend.sources:
        own = [origin for origin in read if origin.startswith(source.prefix + ",")]
        assert own == [source.with_samples(200).origin(i) for i in range(len(own))]
    assert len(read) == len(stages[2]) == 200
    counts = Counter(stages[1][i]["tokens"][0].item() for i in range(30, 70))
    assert counts == {1: 20, 2: 20}
    with expect_error(IndexError, "29", "200", "30"):
        stages[1][29]


def test_the_same_mix_is_no_change(blend: BlendedDataset) -> None:
    """A run that is resumed ten times has one phase, and reads what it would have read without a stop."""
    (_, resumed) = changing(blend, (30, [3, 1]))
    assert resumed.digest == blend.digest
    assert next_phases([Phase(0, tuple(blend.mix))], blend.mix, consumed=30) == [Phase(0, tuple(blend.mix))]


def test_a_phase_without_samples_leaves_no_trace(blend: BlendedDataset) -> None:
    """Somebody tries two mixes at the same checkpoint: only the second one counts."""
    once = changing(blend, (30, [1, 4]))[-1]
    twice = changing(blend, (30, [1, 1]), (30, [1, 4]))[-1]
    assert [twice.origin(i) for i in range(30, 200)] == [once.origin(i) for i in range(30, 200)]


def test_a_single_source_becomes_one_of_two(blend: BlendedDataset) -> None:
    """A source that is added begins at its first sample; the one that was there goes on."""
    alone = blend.sources[0].with_samples(200)
    phases = next_phases([Phase(0, tuple(mix_of(alone)))], blend.mix, consumed=50)
    later = continue_phases(blend, phases)
    numbers = Counter[str]()
    numbers[alone.prefix] = 50
    for index in range(50, 200):
        source = next(each for each in blend.sources if later.origin(index).startswith(each.prefix + ","))
        assert later.origin(index) == source.with_samples(200).origin(numbers[source.prefix])
        numbers[source.prefix] += 1


@examples(25)
@given(
    weights=st.lists(st.lists(st.floats(0.01, 1), min_size=3, max_size=3), min_size=1, max_size=5),
    steps=st.lists(st.integers(0, 40), min_size=5, max_size=5),
)
def test_any_changes_count_up(weights: list[list[float]], steps: list[int]) -> None:
    """What was taken of all sources together is what the run consumed, whatever mixes it went through."""
    phases, consumed = list[Phase](), 0
    for shares, step in zip(weights, steps):
        phases = next_phases(
            phases, [MixedSource(f"digest{i}", "", share) for i, share in enumerate(shares)], consumed=consumed
        )
        consumed += step
    taken = samples_taken(phases, until=consumed)
    assert sum(taken.values()) == consumed
