"""Which samples a rank reads, microbatch by microbatch.

Training reads one stream of sample numbers, in which the microbatches of all data-parallel ranks are side by side: at
stream position p, rank r takes ``p + r·micro`` to ``p + (r + 1)·micro``, and p advances by micro · ranks. So the
samples of a global batch are the same at any number of ranks and any micro-batch size, and a run resumes from one
number.

Two streams: ``single`` is 0, 1, 2 … to the end of the data set; ``cyclic`` never ends, and each pass has another random
order. Megatron-LM's ``cyclic`` gives each rank a part of the data that depends on the number of ranks, is seeded with
the number of the pass alone, and drops what doesn't fill a batch; ours is the same for all layouts, depends on
``--seed``, and drops nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.index_build import random_state
from megatron.core.datasets.sample_order import RecentEpochs


@dataclass(frozen=True, kw_only=True)
class MicrobatchSampler:
    """Lists of ``micro_batch_size`` sample numbers, from the sample after ``consumed`` samples of the run on.

    ``num_samples``: size of the data set. ``shuffle_seed``: the ``cyclic`` stream; None: ``single``.
    ``pad_to``: fill the ``single`` stream up to a multiple of it with None, which stands for a sample without loss;
    else what doesn't fill a microbatch on every rank is left out.
    """

    num_samples: int
    consumed: int
    micro_batch_size: int
    data_parallel_rank: int = 0
    data_parallel_size: int = 1
    shuffle_seed: int | None = None
    pad_to: int = 1

    def __iter__(self) -> Iterator[list[int | None]]:
        stride = self.micro_batch_size * self.data_parallel_size
        before = self.data_parallel_rank * self.micro_batch_size
        orders = RecentEpochs(self._shuffled)
        end = -(-self.num_samples // self.pad_to) * self.pad_to
        for start in itertools.count(self.consumed, stride):
            positions = range(start + before, start + before + self.micro_batch_size)
            if self.shuffle_seed is not None:
                places = [divmod(position, self.num_samples) for position in positions]
                yield [orders[number].item(place) for number, place in places]
            elif start + stride <= end:
                yield [position if position < self.num_samples else None for position in positions]
            else:
                return

    def _shuffled(self, number: int) -> NDArray[np.int64]:
        assert self.shuffle_seed is not None
        return random_state(self.shuffle_seed, number).permutation(self.num_samples)
