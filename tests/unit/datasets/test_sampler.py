"""The samples of a global batch are the same on any number of ranks, with any micro-batch size, resumed anywhere."""

from __future__ import annotations

import itertools

import pytest

from megatron.core.datasets.sampler import MicrobatchSampler

GLOBAL_BATCH = 24
LAYOUTS = [
    (micro, ranks) for micro in (1, 2, 3, 4, 6, 12) for ranks in (1, 2, 3, 4) if GLOBAL_BATCH % (micro * ranks) == 0
]


def global_batches(*, micro: int, ranks: int, consumed: int, count: int, seed: int | None) -> list[list[int | None]]:
    """Samples of whole global batches, from what all ranks read together."""
    streams = [
        iter(
            MicrobatchSampler(
                num_samples=1000,
                consumed=consumed,
                micro_batch_size=micro,
                data_parallel_rank=rank,
                data_parallel_size=ranks,
                shuffle_seed=seed,
            )
        )
        for rank in range(ranks)
    ]
    steps = GLOBAL_BATCH // (micro * ranks)
    return [list(itertools.chain(*(next(stream) for _ in range(steps) for stream in streams))) for _ in range(count)]


@pytest.mark.parametrize(("micro", "ranks"), LAYOUTS)
@pytest.mark.parametrize("seed", [None, 7])
def test_global_batches_do_not_depend_on_the_layout(micro: int, ranks: int, seed: int | None) -> None:
    """Going on with more GPUs neither repeats nor skips a sample."""
    expected = global_batches(micro=1, ranks=1, consumed=48, count=5, seed=seed)
    assert global_batches(micro=micro, ranks=ranks, consumed=48, count=5, seed=seed) == expected


@pytest.mark.parametrize("seed", [None, 7])
def test_resuming_goes_on_where_the_run_stopped(seed: int | None) -> None:
    """Position is one number; what follows equals the uninterrupted stream, across passes too."""
    whole = global_batches(micro=2, ranks=3, consumed=0, count=41, seed=seed)
    for batches in (0, 1, 17, 40):
        rest = global_batches(micro=2, ranks=3, consumed=GLOBAL_BATCH * batches, count=1, seed=seed)
        assert rest == whole[batches : batches + 1]


def test_single_is_the_order_of_the_data_set() -> None:
    """The data set has its own shuffle; rank 1 of 2 reads the second half of each batch."""
    sampler = MicrobatchSampler(
        num_samples=20, consumed=4, micro_batch_size=2, data_parallel_rank=1, data_parallel_size=2
    )
    assert list(sampler) == [[6, 7], [10, 11], [14, 15], [18, 19]]


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_fills_no_batch_is_dropped_or_padded(ranks: int) -> None:
    """Ten samples, four a batch: without padding two are left out; with it all ranks get a third microbatch."""

    def streams(pad_to: int) -> list[list[list[int | None]]]:
        return [
            list(
                MicrobatchSampler(
                    num_samples=10,
                    consumed=0,
                    micro_batch_size=4 // ranks,
                    data_parallel_rank=rank,
                    data_parallel_size=ranks,
                    pad_to=pad_to,
                )
            )
            for rank in range(ranks)
        ]

    dropped, padded = streams(1), streams(4)
    assert all(len(stream) == 2 for stream in dropped)
    assert all(len(stream) == 3 for stream in padded)
    assert list(itertools.chain(*(stream[2] for stream in padded))) == [8, 9, None, None]


def test_cyclic_passes_hold_every_sample_once() -> None:
    """Each pass is a new order of all samples; nothing is dropped between passes; another seed is another order."""

    def passes(seed: int) -> list[list[int | None]]:
        sampler = MicrobatchSampler(num_samples=10, consumed=0, micro_batch_size=3, shuffle_seed=seed)
        stream = list(itertools.chain(*itertools.islice(sampler, 10)))
        return [stream[:10], stream[10:20], stream[20:]]

    orders = passes(1)
    assert all(sorted(order, key=str) == sorted(range(10), key=str) for order in orders)
    assert orders[0] != orders[1] != orders[2]
    assert passes(2) != orders == passes(1)


def test_cyclic_passes_resume_in_their_own_order() -> None:
    """A run that stopped in its third pass over the data must not read the first one's order again."""
    settings = {"num_samples": 10, "micro_batch_size": 3, "shuffle_seed": 5}
    whole = list(itertools.islice(MicrobatchSampler(consumed=0, **settings), 20))
    assert list(itertools.islice(MicrobatchSampler(consumed=24, **settings), 12)) == whole[8:]
