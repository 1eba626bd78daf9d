"""Sample i is a function of seed, data and i: any run, long or short, fresh or resumed, finds the same one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatron.core.datasets import sample_order
from megatron.core.datasets.index_build import SampleIndex, build_epoch, build_megatron
from megatron.core.datasets.index_cache import IndexCache
from megatron.core.datasets.sample_order import EpochOrder, MegatronOrder

LENGTHS = np.random.RandomState(0).randint(1, 20, 30).astype(np.int32)
NO_CACHE = IndexCache(None)


def epoch_order(num_samples: int | None, *, seed: int = 1, copy: int = 0) -> EpochOrder:
    return EpochOrder(LENGTHS, seed=seed, seq_length=8, num_samples=num_samples, cache=NO_CACHE, copy=copy)


def place(order: EpochOrder | MegatronOrder, index: int) -> tuple[int, int, list[int]]:
    """First document, offset in it, and the documents after it."""
    start = order.find(index)
    after = start.documents[start.position : start.position + 10].tolist()
    return after[0], start.offset, after


def test_longer_run_keeps_the_prefix() -> None:
    """Extending a run changes nothing that was read; Megatron-LM reshuffles everything."""
    short, long = epoch_order(50), epoch_order(5000)
    assert [place(short, i) for i in range(50)] == [place(long, i) for i in range(50)]
    assert short.digest == long.digest


def test_samples_come_epoch_by_epoch() -> None:
    """Sample i is number i mod N of epoch i // N, each epoch shuffled by itself."""
    order = epoch_order(None)
    per_epoch = len(order)
    for epoch in (0, 1, 7, 2):
        built = build_epoch(LENGTHS, seed=1, epoch=epoch, seq_length=8)
        for number in (0, per_epoch - 1):
            start = order.find(epoch * per_epoch + number)
            assert [start.position, start.offset] == built.samples[number].tolist()
            assert start.documents.tolist() == built.documents.tolist()


def test_jumping_in_gives_the_same_sample() -> None:
    """A run that resumes in epoch 90 doesn't walk through 89 epochs, and reads what the first run read."""
    walked = epoch_order(10_000)
    places = [place(walked, i) for i in range(3000)]
    for index in (2999, 1500, 0, 1501):
        assert place(epoch_order(10_000), index) == places[index]


def test_epochs_are_built_when_needed_and_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time and memory don't grow with the length of the run."""
    built: list[int] = []

    def counted(*arguments: Any, **options: Any) -> SampleIndex:
        built.append(options["epoch"])
        return build_epoch(*arguments, **options)

    monkeypatch.setattr(sample_order, "build_epoch", counted)
    order = epoch_order(1_000_000)
    assert built == []
    per_epoch = order.samples_per_epoch
    for index in range(4 * per_epoch):
        order.find(index)
    order.find(3 * per_epoch - 1)
    assert built == [0, 1, 2, 3]
    assert len(order._epochs) == 2


@pytest.mark.parametrize("other", [{"seed": 2}, {"copy": 1}])
def test_digest_differs_when_samples_do(other: dict[str, int]) -> None:
    """Ranks that compare digests notice that they would read different data."""
    order = epoch_order(10)
    assert epoch_order(10, **other).digest != order.digest
    longer = EpochOrder(LENGTHS + 1, seed=1, seq_length=8, num_samples=10, cache=NO_CACHE)
    assert longer.digest != order.digest


def test_megatron_order_reads_through_its_shuffle() -> None:
    """Training meets the samples in the order of the shuffle index."""
    order = MegatronOrder(LENGTHS, seed=5, seq_length=8, num_samples=100, cache=NO_CACHE)
    index = build_megatron(LENGTHS, seed=5, num_samples=100, seq_length=8)
    assert len(order) == len(index.shuffle) >= 100
    for number in (0, 57, len(order) - 1):
        start = order.find(number)
        assert [start.position, start.offset] == index.starts[index.shuffle[number]].tolist()
