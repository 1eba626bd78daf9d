"""The way from a sample's number to its place in the shuffled documents: epoch by epoch, or as in Megatron-LM."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from megatron.core.datasets.index_build import Lengths, SampleIndex, build_epoch, build_megatron, num_samples_in
from megatron.core.datasets.index_cache import IndexCache, digest_of
from megatron.core.datasets.samples import Order

_KEPT_EPOCHS = 2  # shuffled reading crosses one border at a time
T = TypeVar("T")


class SampleStart(NamedTuple):
    """A sample begins ``offset`` tokens into document ``documents[position]`` and continues in those after it."""

    documents: NDArray[Any]
    position: int
    offset: int


class RecentEpochs(dict[int, T]):
    """``build(epoch)`` by epoch, kept for the two epochs that were built last."""

    def __init__(self, build: Callable[[int], T]) -> None:
        self._build = build

    def __missing__(self, epoch: int) -> T:
        while len(self) >= _KEPT_EPOCHS:
            del self[next(iter(self))]
        self[epoch] = self._build(epoch)
        return self[epoch]


class IndexedOrder(Order):
    """An endless sequence of epochs, each with its own index, which is built or read from the cache at first use.

    ``build(epoch=…)`` makes the index of an epoch. ``digest``: of everything else that it depends on. ``rows``: about
    how large it is.
    """

    def __init__(
        self,
        build: Callable[..., SampleIndex],
        *,
        digest: str,
        samples_per_epoch: int,
        num_samples: int | None,
        rows: int,
        cache: IndexCache,
    ) -> None:
        super().__init__(digest=digest, samples_per_epoch=samples_per_epoch, num_samples=num_samples)
        self._build, self._rows, self._cache = build, rows, cache
        self._epochs = RecentEpochs(self._load)

    def _load(self, epoch: int) -> SampleIndex:
        return self._cache.get(lambda: self._build(epoch=epoch), rows=self._rows, inputs=(self.digest, epoch))

    @override
    def prepare(self) -> None:
        """Store all indices that the samples need in the cache."""
        for epoch in range(-(-len(self) // self.samples_per_epoch)):
            self._load(epoch)


class EpochOrder(IndexedOrder):
    """Our order: sample i depends on the lengths of the documents, the seed and i, not on how many are asked for.

    ``copy`` distinguishes several uses of the same data in one blend. ``shared``: tokens that neighbouring samples
    share, see ``build_epoch``.
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
        super().__init__(
            partial(build_epoch, lengths, seed=seed, copy=copy, **settings),
            digest=digest_of("epoch", lengths, seed, copy, *settings.values()),
            samples_per_epoch=per_epoch,
            num_samples=num_samples,
            rows=len(lengths) + per_epoch,
            cache=cache,
        )

    def find(self, index: int) -> SampleStart:
        """Start of sample ``index``."""
        epoch, number = divmod(index, self.samples_per_epoch)
        found = self._epochs[epoch]
        return SampleStart(found.documents, found.samples.item(number, 0), found.samples.item(number, 1))


class MegatronOrder(Order):
    """Megatron-LM's order for a run of ``num_samples``.

    It may hold more samples than asked for: the rest of its last epoch.
    """

    is_endless = False

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
        settings: dict[str, Any] = {"seq_length": seq_length, "drop_last_partial": drop_last_partial}
        digest = digest_of("megatron", lengths, seed, seq_length, num_samples, drop_last_partial)
        self._index = cache.get(
            lambda: build_megatron(lengths, seed=seed, num_samples=num_samples, **settings).in_training_order(),
            rows=len(lengths) + (num_samples or 0),
            inputs=(digest,),
        )
        per_epoch = num_samples_in(int(lengths.sum(dtype=np.int64)), **settings)
        super().__init__(digest=digest, samples_per_epoch=per_epoch, num_samples=len(self._index.samples))

    def find(self, index: int) -> SampleStart:
        """Start of sample ``index``."""
        samples = self._index.samples
        return SampleStart(self._index.documents, samples.item(index, 0), samples.item(index, 1))
