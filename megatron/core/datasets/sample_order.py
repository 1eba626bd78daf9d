"""From a sample's number to its place in the shuffled documents: our order, epoch by epoch, or Megatron-LM's."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.index_build import (
    Lengths,
    SampleIndex,
    build_epoch,
    build_megatron,
    num_samples_in,
)
from megatron.core.datasets.index_cache import IndexCache, digest_of

_KEPT_EPOCHS = 2  # shuffled reading crosses one border at a time


class SampleStart(NamedTuple):
    """A sample begins ``offset`` tokens into document ``documents[position]`` and goes on through those after it."""

    documents: NDArray[Any]
    position: int
    offset: int


class SampleOrder(Protocol):
    """Says where each sample starts."""

    @property
    def digest(self) -> str:
        """Hex digest of all that the order follows from."""

    @property
    def samples_per_epoch(self) -> int:
        """Samples that the documents give when each is read once."""

    def __len__(self) -> int:
        """Number of samples."""

    def find(self, index: int) -> SampleStart:
        """Start of sample ``index``."""


class EpochOrder:
    """Our order: sample i depends on the lengths of the documents, the seed and i, not on how many are asked for.

    ``num_samples`` None: one epoch. ``copy`` tells apart several uses of the same data in one blend.
    """

    def __init__(
        self,
        lengths: Lengths,
        *,
        seed: int,
        seq_length: int,
        num_samples: int | None,
        cache: IndexCache,
        copy: int = 0,
        drop_last_partial: bool = True,
    ) -> None:
        self._lengths, self._cache = lengths, cache
        self._seed, self._copy, self._seq_length, self._drop_last_partial = seed, copy, seq_length, drop_last_partial
        self.samples_per_epoch = _samples_in(lengths, seq_length=seq_length, drop_last_partial=drop_last_partial)
        self._num_samples = self.samples_per_epoch if num_samples is None else num_samples
        self._epochs: OrderedDict[int, SampleIndex] = OrderedDict()
        self.digest = digest_of("epoch", lengths, seed, copy, seq_length, drop_last_partial)

    def __len__(self) -> int:
        return self._num_samples

    def with_samples(self, num_samples: int) -> EpochOrder:
        """The same order, of more samples or fewer."""
        other = copy.copy(self)
        other._num_samples = num_samples
        return other

    def find(self, index: int) -> SampleStart:
        """Start of sample ``index``."""
        epoch, number = divmod(index, self.samples_per_epoch)
        found = self._epochs.get(epoch) or self._load(epoch)
        return SampleStart(found.documents, found.samples.item(number, 0), found.samples.item(number, 1))

    def _load(self, epoch: int) -> SampleIndex:
        while len(self._epochs) >= _KEPT_EPOCHS:
            self._epochs.popitem(last=False)
        self._epochs[epoch] = self._cache.get(
            lambda: build_epoch(
                self._lengths,
                seed=self._seed,
                epoch=epoch,
                copy=self._copy,
                seq_length=self._seq_length,
                drop_last_partial=self._drop_last_partial,
            ),
            rows=len(self._lengths) + self.samples_per_epoch,
            inputs=(self.digest, epoch),
        )
        return self._epochs[epoch]


class MegatronOrder:
    """Megatron-LM's order for a run of ``num_samples``; ``num_samples`` None: one epoch.

    It may hold more samples than asked for: the rest of its last epoch.
    """

    def __init__(
        self,
        lengths: Lengths,
        *,
        seed: int,
        seq_length: int,
        num_samples: int | None,
        cache: IndexCache,
        drop_last_partial: bool = True,
    ) -> None:
        self.samples_per_epoch = _samples_in(lengths, seq_length=seq_length, drop_last_partial=drop_last_partial)
        self.digest = digest_of("megatron", lengths, seed, seq_length, num_samples, drop_last_partial)
        self._index = cache.get(
            lambda: build_megatron(
                lengths,
                seed=seed,
                num_samples=num_samples,
                seq_length=seq_length,
                drop_last_partial=drop_last_partial,
            ).in_training_order(),
            rows=len(lengths) + (num_samples or 0),
            inputs=(self.digest,),
        )

    def __len__(self) -> int:
        return len(self._index.samples)

    def find(self, index: int) -> SampleStart:
        """Start of sample ``index``."""
        samples = self._index.samples
        return SampleStart(self._index.documents, samples.item(index, 0), samples.item(index, 1))


def _samples_in(lengths: Lengths, *, seq_length: int, drop_last_partial: bool) -> int:
    tokens = int(lengths.sum(dtype=np.int64))
    return num_samples_in(tokens, seq_length=seq_length, drop_last_partial=drop_last_partial)
