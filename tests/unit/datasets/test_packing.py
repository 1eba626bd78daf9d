"""Packed documents: every pair of a token and its label once, none across documents, as little padding as best fit."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.datasets.index_cache import IndexCache
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.packing import BestFitOrder, PackedDataset, PaddingFreeOrder, assign_bins
from tests.tiers import examples
from tests.unit.datasets.conftest import WriteDocuments

SEQUENCE = 16
LENGTHS = st.lists(st.integers(0, 50), min_size=1, max_size=40)


def best_fit_by_hand(sizes: list[int], capacity: int) -> list[int]:
    """Room left in each bin when each piece, the longest first, goes to the tightest bin that takes it."""
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [(room, number) for number, room in enumerate(rooms) if room >= size]
        if fitting:
            rooms[min(fitting)[1]] -= size
        else:
            rooms.append(capacity - size)
    return sorted(rooms)


@examples(200)
@given(sizes=st.lists(st.integers(1, 20), min_size=1, max_size=80))
def test_the_plan_is_best_fit(sizes: list[int]) -> None:
    """Placing all pieces of a size at once gives the bins that placing them one by one does."""
    bins = assign_bins(np.bincount(sizes, minlength=21))
    assert len(bins) == len(sizes)
    filled = np.bincount(bins, weights=sorted(sizes, reverse=True))
    assert sorted((20 - filled).tolist()) == best_fit_by_hand(sizes, 20)


def dataset(write_documents: WriteDocuments, lengths: list[int], kind: type, **order: int) -> PackedDataset:
    """Documents whose tokens are unique: document d holds 100 · d, 100 · d + 1, …"""
    documents = IndexedDataset(
        write_documents([range(100 * number, 100 * number + length) for number, length in enumerate(lengths)])
    )
    ordered = kind(documents.lengths, seed=1, seq_length=SEQUENCE, num_samples=None, cache=IndexCache(None), **order)
    return PackedDataset(documents, ordered, seq_length=SEQUENCE)


def pairs(data: PackedDataset, indices: range) -> Counter[tuple[int, int]]:
    """Pairs of a token and its label that are learned."""
    found: Counter[tuple[int, int]] = Counter()
    for index in indices:
        sample = data[index]
        kept = sample["loss_mask"] > 0
        found.update(zip(sample["tokens"][kept].tolist(), sample["labels"][kept].tolist()))
    return found


def all_pairs(lengths: list[int]) -> Counter[tuple[int, int]]:
    return Counter(
        (100 * number + place, 100 * number + place + 1)
        for number, length in enumerate(lengths)
        for place in range(length - 1)
    )


LONG = [3, 1, 0, 16, 17, 18, 40, 2, 2, 9, 33, 5, 50, 16]


def test_best_fit_learns_every_pair_once(write_documents: WriteDocuments) -> None:
    """In every epoch; nothing is cut from a document that fits, and long documents lose nothing at their cuts."""
    data = dataset(write_documents, LONG, BestFitOrder)
    per_epoch = data.order.samples_per_epoch
    data = data.with_samples(3 * per_epoch)
    for epoch in range(3):
        assert pairs(data, range(epoch * per_epoch, (epoch + 1) * per_epoch)) == all_pairs(LONG)
    assert [data.origin(index) for index in range(per_epoch)] != [
        data.origin(index) for index in range(per_epoch, 2 * per_epoch)
    ]


def test_padding_free_learns_every_pair_once(write_documents: WriteDocuments) -> None:
    """But for those left over at the end of the epoch, less than a sample; and no place of a sample is padding."""
    data = dataset(write_documents, LONG, PaddingFreeOrder)
    learned = pairs(data, range(len(data)))
    assert set(learned.values()) == {1}
    assert learned <= all_pairs(LONG)
    assert learned.total() == SEQUENCE * len(data) > all_pairs(LONG).total() - SEQUENCE


@pytest.mark.parametrize("kind", [BestFitOrder, PaddingFreeOrder])
def test_every_document_by_itself(write_documents: WriteDocuments, kind: type) -> None:
    """Segments and positions restart with each document, at its real border: no end token is needed to find it."""
    data = dataset(write_documents, LONG, kind)
    for index in range(len(data)):
        sample = data[index]
        for segment in np.unique(sample["document_ids"]):
            inside = sample["document_ids"] == segment
            assert sample["position_ids"][inside].tolist() == [0] * inside.sum() or sample["position_ids"][
                inside
            ].tolist() == list(range(inside.sum()))
            if sample["loss_mask"][inside].any():
                tokens = sample["tokens"][inside]
                assert set(tokens // 100) == {tokens[0] // 100}
                assert (np.diff(tokens) == 1).all()
        assert (np.diff(sample["document_ids"]) >= 0).all()
        assert sample["text_length"] == sample["loss_mask"].sum()


@examples(60)
@given(lengths=LENGTHS)
def test_any_documents(lengths: list[int]) -> None:
    """Empty documents, documents of one token, documents of exactly a sample: none is lost or read twice."""
    sizes = np.array(lengths, np.int32)
    for kind in (BestFitOrder, PaddingFreeOrder):
        order = kind(sizes, seed=3, seq_length=SEQUENCE, num_samples=None, cache=IndexCache(None))
        seen: Counter[tuple[int, int]] = Counter()
        for index in range(order.samples_per_epoch):
            pieces = order.pieces(index)
            assert sum(count for _, _, count in pieces) <= SEQUENCE
            seen.update((document, offset + k) for document, offset, count in pieces for k in range(count))
        wanted = Counter((document, k) for document, length in enumerate(lengths) for k in range(max(length - 1, 0)))
        assert set(seen.values()) <= {1}
        assert seen <= wanted
        assert wanted.total() - seen.total() < (1 if kind is BestFitOrder else SEQUENCE)


def test_best_fit_does_not_train_on_the_longest_documents_first(write_documents: WriteDocuments) -> None:
    """Samples are made in the order of falling size, in which each epoch would begin with the same long documents."""
    order = dataset(write_documents, list(range(2, 80)), BestFitOrder).order
    largest = [max(count for _, _, count in order.pieces(index)) for index in range(len(order))]
    assert len(order) > 50
    assert largest != sorted(largest, reverse=True)


def test_longer_run_keeps_the_prefix(write_documents: WriteDocuments) -> None:
    for kind in (BestFitOrder, PaddingFreeOrder):
        data = dataset(write_documents, LONG, kind)
        longer = data.with_samples(5 * len(data))
        assert [data.origin(index) for index in range(len(data))] == [longer.origin(i) for i in range(len(data))]
        assert data.digest == longer.digest
        assert dataset(write_documents, LONG, kind, copy=1).digest != data.digest


def test_it_says_how_much_is_padding(write_documents: WriteDocuments) -> None:
    data = dataset(write_documents, [9, 9, 9], BestFitOrder)  # two documents of 8 pairs fill a sample, one half of one
    assert data.describe() == [f"{data.prefix}: 2 samples, 1.00 epochs, 25.0% padding"]
    assert data[None]["loss_mask"].sum() == data[None]["text_length"] == 0
