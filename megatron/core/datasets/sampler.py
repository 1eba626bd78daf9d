"""Which samples a rank reads, microbatch by microbatch.

Training reads one stream of sample numbers. The microbatches of all data-parallel ranks lie side by side in it: at
stream position p, rank r takes ``p + r·micro`` to ``p + (r + 1)·micro``, and p advances by micro · ranks. So the
samples of a global batch are the same at any number of ranks and any micro-batch size, and a run resumes from one
number.

Two streams: ``single`` is 0, 1, 2 … to the end of the data set; ``cyclic`` goes on for ever, each pass in another
random order. Megatron-LM's ``cyclic`` gives each rank a part of the data that depends on the number of ranks, seeds
with the pass alone, and drops what doesn't fill a batch; ours is one order for all layouts, follows ``--seed``, and
drops nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.datasets.index_build import random_state


@dataclass(frozen=True, kw_only=True)
class MicrobatchSampler:
    """Lists of ``micro_batch_size`` sample numbers, beginning after ``consumed`` samples of the run.

    ``num_samples``: size of the data set. ``shuffle_seed``: the ``cyclic`` stream; None: ``single``.
    ``pad_to``: fill the ``single`` stream up to a multiple of it with None, which stands for a sample that counts for
    nothing; else what doesn't fill a microbatch on every rank is left out.
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
        passes = None if self.shuffle_seed is None else _Passes(self.num_samples, self.shuffle_seed)
        end = -(-self.num_samples // self.pad_to) * self.pad_to
        for start in itertools.count(self.consumed, stride):
            positions = range(start + before, start + before + self.micro_batch_size)
            if passes is not None:
                yield [passes.sample(position) for position in positions]
            elif start + stride <= end:
                yield [position if position < self.num_samples else None for position in positions]
            else:
                return


class _Passes:
    """An endless stream of passes over the data, each in its own random order."""

    def __init__(self, num_samples: int, seed: int) -> None:
        self._num_samples, self._seed = num_samples, seed
        self._number = -1

    def sample(self, position: int) -> int:
        """Sample at a position of the stream; quick for positions of the same pass."""
        number, place = divmod(position, self._num_samples)
        if number != self._number:
            self._number, self._order = number, random_state(self._seed, number).permutation(self._num_samples)
        return self._order.item(place)
