"""From a sample's number to its place in the shuffled documents: our order, epoch by epoch, or Megatron-LM's."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
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
from megatron.core.datasets.samples import EndlessOrder, Order

_KEPT_EPOCHS = 2  # shuffled reading crosses one border at a time


class SampleStart(NamedTuple):
    """A sample begins ``offset`` tokens into document ``documents[position]`` and goes on through those after it."""

    documents: NDArray[Any]
    position: int
    offset: int


class SampleOrder(Order, Protocol):
    """Says where each sample of a stream starts."""

    def find(self, index: int) -> SampleStart:
        """Start of sample ``index``."""


class Epochs:
    """An endless sequence of epochs, each with its own index, built or read from the cache when it is first needed.

    ``build(epoch=…)`` makes the index of an epoch. ``digest``: of all that it follows from but the epoch. ``rows``:
    about how large it is.
    """

    def __init__(
        self,
        build: Callable[..., SampleIndex],
        *,
        samples_per_epoch: int,
        rows: int,
        digest: str,
        cache: IndexCache,
    ) -> None:
        self.samples_per_epoch, self.digest = samples_per_epoch, digest
        self._build, self._rows, self._cache = build, rows, cache
        self._loaded: OrderedDict[int, SampleIndex] = OrderedDict()

    def find(self, index: int) -> tuple[SampleIndex, int]:
        """Index of the epoch in which sample ``index`` lies, and the sample's row there."""
        epoch, number = divmod(index, self.samples_per_epoch)
        return self._loaded.get(epoch) or self._load(epoch), number

    def prepare(self, num_samples: int) -> None:
        """Put the indices of the first ``num_samples`` samples into the cache."""
        for epoch in range(-(-num_samples // self.samples_per_epoch)):
            self._load(epoch)

    def _load(self, epoch: int) -> SampleIndex:
        while len(self._loaded) >= _KEPT_EPOCHS:
            self._loaded.popitem(last=False)
        self._loaded[epoch] = self._cache.get(
            lambda: self._build(epoch=epoch), rows=self._rows, inputs=(self.digest, epoch)
        )
        return self._loaded[epoch]


class EpochOrder(EndlessOrder):
    """Our order: sample i depends on the lengths of the documents, the seed and i, not on how many are asked for.

    ``num_samples`` None: one epoch. ``copy`` tells apart several uses of the same data in one blend. ``shared``: tokens
    that neighbouring samples share, see ``build_epoch``.
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
        shared: int = 1,
    ) -> None:
        settings: dict[str, Any] = {"seq_length": seq_length, "drop_last_partial": drop_last_partial, "shared": shared}
        per_epoch = num_samples_in(int(lengths.sum(dtype=np.int64)), **settings)
        self._epochs = Epochs(
            partial(build_epoch, lengths, seed=seed, copy=copy, **settings),
            samples_per_epoch=per_epoch,
            rows=len(lengths) + per_epoch,
            digest=digest_of("epoch", lengths, seed, copy, *settings.values()),
            cache=cache,
        )
        super().__init__(digest=self._epochs.digest, samples_per_epoch=per_epoch, num_samples=num_samples)

    def find(self, index: int) -> SampleStart:
        """Start of sample ``index``."""
        found, number = self._epochs.find(index)
        return SampleStart(found.documents, found.samples.item(number, 0), found.samples.item(number, 1))

    def prepare(self) -> None:
        """Put all indices that the samples need into the cache."""
        self._epochs.prepare(self._num_samples)


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

    def prepare(self) -> None:
        """The whole index is built, and in the cache, from the beginning."""

    def find(self, index: int) -> SampleStart:
        """Start of sample ``index``."""
        samples = self._index.samples
        return SampleStart(self._index.documents, samples.item(index, 0), samples.item(index, 1))


def _samples_in(lengths: Lengths, *, seq_length: int, drop_last_partial: bool) -> int:
    tokens = int(lengths.sum(dtype=np.int64))
    return num_samples_in(tokens, seq_length=seq_length, drop_last_partial=drop_last_partial)
