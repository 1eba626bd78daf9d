"""Which tokens make up sample i: every token is used, none twice in an epoch, and a longer run keeps what it had."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron.core.datasets.index_build import SampleIndex, build_epoch, build_megatron, num_samples_in


def spans(index: SampleIndex, lengths: NDArray[np.int32], *, seq_length: int) -> list[list[tuple[int, int]]]:
    """Each sample as the (document, token) pairs it reads, found by walking."""
    found = []
    for position, offset in index.samples.tolist():
        sample: list[tuple[int, int]] = []
        while len(sample) <= seq_length and position < len(index.documents):
            document = int(index.documents[position])
            sample += [(document, token) for token in range(offset, lengths[document])]
            position, offset = position + 1, 0
        found.append(sample[: seq_length + 1])
    return found


def golden_lengths(golden: dict[str, Any], documents: list[int]) -> NDArray[np.int32]:
    return np.array([len(golden["gpt_docs"][document]) for document in documents], np.int32)


@pytest.mark.parametrize("case", range(7))
def test_megatron_order_equals_recorded_one(golden: dict[str, Any], case: int) -> None:
    """One epoch, several, with the last one shuffled apart or not, and a validation split, with the types of each."""
    recorded = golden["gpt_cases"][case]
    documents = recorded.get("indices", list(range(12)))
    index = build_megatron(
        golden_lengths(golden, documents),
        seed=recorded.get("seed", 1234),
        num_samples=recorded["num_samples"],
        seq_length=recorded["seq"],
    )
    assert (index.documents + documents[0]).tolist() == recorded["document_index"]
    assert index.starts.tolist() == recorded["sample_index"][:-1]
    assert index.shuffle.tolist() == recorded["shuffle_index"]
    types = [str(table.dtype) for table in (index.documents, index.starts, index.shuffle)]
    assert types == recorded.get("dtypes", types)


def test_megatron_order_shuffles_the_last_epoch_apart_below_80_percent() -> None:
    """401 tokens a epoch, 40 samples of 10: from 32 in the last epoch on, all epochs are shuffled together."""
    lengths = np.full(401, 1, np.int32)
    apart, together = (build_megatron(lengths, seed=1, num_samples=40 + used, seq_length=10) for used in (31, 32))
    assert sorted(apart.documents[:401].tolist()) == list(range(401))
    assert sorted(apart.shuffle[:40].tolist()) == list(range(40))
    assert sorted(together.documents[:401].tolist()) != list(range(401))
    assert sorted(together.shuffle[:40].tolist()) != list(range(40))


def test_megatron_order_with_the_last_partial_sample(golden: dict[str, Any]) -> None:
    """150 tokens hold 18 samples of 8 tokens and a label; the rest of 5 tokens becomes a 19th that starts at (11, 12).

    (The recorded case of this kind ran without the option in effect; these numbers are the compiled helper's.)
    """
    lengths = golden_lengths(golden, list(range(12)))
    whole = build_megatron(lengths, seed=1234, num_samples=None, seq_length=8)
    partial = build_megatron(lengths, seed=1234, num_samples=None, seq_length=8, drop_last_partial=False)
    assert (len(whole.starts), len(partial.starts)) == (18, 19)
    assert partial.starts.tolist() == [*whole.starts.tolist(), [11, 12]]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("seq_length", [1, 2, 7, 30])
def test_epoch_uses_each_token_once(seed: int, seq_length: int) -> None:
    """Each token but the first is the label of one sample at most; at most S tokens at the end of an epoch are left."""
    lengths = np.random.RandomState(seed).randint(0, 12, 25).astype(np.int32)
    index = build_epoch(lengths, seed=seed, epoch=0, seq_length=seq_length)
    samples = spans(index, lengths, seq_length=seq_length)
    assert all(len(sample) == seq_length + 1 for sample in samples)
    labels = [token for sample in samples for token in sample[1:]]
    assert len(set(labels)) == len(labels)
    assert 0 <= int(lengths.sum()) - 1 - len(labels) < seq_length
    assert sorted(index.documents.tolist()) == list(range(len(lengths)))


def test_samples_start_inside_documents() -> None:
    """Empty documents, and borders between documents, are skipped: the first token read is a real one."""
    lengths = np.array([0, 3, 0, 0, 5, 1, 0], np.int32)
    for seed in range(20):
        index = build_epoch(lengths, seed=seed, epoch=0, seq_length=2)
        for position, offset in index.samples.tolist():
            assert 0 <= offset < lengths[index.documents[position]]


def test_partial_sample_reads_the_rest() -> None:
    """Without dropping it, the last sample holds the tokens that fill no whole one: no validation token is left out."""
    lengths = np.array([4, 4, 3], np.int32)
    index = build_epoch(lengths, seed=1, epoch=0, seq_length=4, drop_last_partial=False)
    samples = spans(index, lengths, seq_length=4)
    assert sorted(map(len, samples)) == [3, 5, 5]
    assert len({token for sample in samples for token in sample[1:]}) == 10


@pytest.mark.parametrize(
    ("tokens", "dropped", "kept"),
    [(0, 0, 0), (1, 0, 0), (8, 0, 1), (9, 1, 1), (10, 1, 2), (17, 2, 2), (2**40 + 1, 2**37, 2**37)],
)
def test_number_of_samples(tokens: int, dropped: int, kept: int) -> None:
    """(T - 1) / 8 rounded down or up, exactly at any size."""
    assert num_samples_in(tokens, seq_length=8) == dropped
    assert num_samples_in(tokens, seq_length=8, drop_last_partial=False) == kept


def test_everything_random_depends_on_seed_epoch_and_copy() -> None:
    """Two epochs, seeds, or uses of one source in a blend must not repeat each other; the same inputs must."""
    lengths = np.full(40, 9, np.int32)
    built = [
        build_epoch(lengths, seed=seed, epoch=epoch, copy=copy, seq_length=8)
        for seed, epoch, copy in [(1, 0, 0), (1, 1, 0), (2, 0, 0), (1, 0, 1), (2**32 + 1, 0, 0)]
    ]
    for table in ("documents", "samples"):
        tables = [getattr(index, table).tolist() for index in built]
        assert all(first != second for i, first in enumerate(tables) for second in tables[:i])
    again = build_epoch(lengths, seed=1, epoch=0, seq_length=8)
    assert again.samples.tolist() == built[0].samples.tolist()


def test_order_is_the_one_of_all_releases() -> None:
    """A resumed run relies on it: these numbers may never change."""
    index = build_epoch(np.arange(1, 9, dtype=np.int32), seed=1234, epoch=3, seq_length=5)
    assert index.documents.tolist() == [7, 0, 4, 1, 2, 6, 5, 3]
    assert index.samples.tolist() == [[5, 6], [2, 1], [0, 0], [3, 1], [5, 1], [0, 5], [6, 4]]


def test_totals_beyond_32_bits() -> None:
    """Three documents of a billion tokens: offsets are counted in 64 bits where 32 don't hold them."""
    lengths = np.full(3, 10**9, np.int32)
    index = build_epoch(lengths, seed=1, epoch=0, seq_length=10**6)
    assert len(index.samples) == 2999
    assert sorted(index.samples[:, 0].tolist()) == [0] * 1000 + [1] * 1000 + [2] * 999
    assert index.samples[:, 1].min() >= 0
    assert index.samples[:, 1].max() < 10**9
