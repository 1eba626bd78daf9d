"""What all data sets of samples have in common: documents, an order, and a name for messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.index_cache import digest_of
from megatron.errors import DataError

if TYPE_CHECKING:
    from typing_extensions import Self

Sample = dict[str, NDArray[Any]]

TEXT_LENGTH = "text_length"
"""A field of samples: positions of text, int64. Those after them are padding, which nothing may count."""


class Documents(Protocol):
    """Token sequences by number: an IndexedDataset, or mock data.

    ``prefix``: name for messages. ``lengths`` [documents] in tokens.
    """

    prefix: str
    lengths: NDArray[np.int32]

    @property
    def fingerprint(self) -> str:
        """Digest of a part of the tokens, which distinguishes data whose documents have the same lengths."""

    def get(self, index: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Tokens ``[offset, offset + length)`` of a document."""


class SampleDataset(Protocol):
    """Samples by number."""

    @property
    def digest(self) -> str:
        """Hex digest of document lengths, seed and settings, which determine every sample; ranks compare it."""

    def __len__(self) -> int:
        """Number of samples."""

    def __getitem__(self, index: int | None) -> Sample:
        """Sample ``index``; None gives one without loss, to fill a batch."""

    def origin(self, index: int) -> str:
        """Where a sample's tokens are stored, for messages."""

    def describe(self) -> list[str]:
        """What the samples come from, a line per source."""


class SourceDataset(SampleDataset, Protocol):
    """Samples of one source, as many as are asked for."""

    @property
    def prefix(self) -> str:
        """The source's name for messages."""

    def with_samples(self, num_samples: int) -> SourceDataset:
        """This data set with another number of samples, of which the common ones are unchanged."""

    def prepare(self) -> None:
        """Store all indices that the samples need in the cache."""


class Order:
    """Where each sample begins, and how many there are; ``num_samples`` None: one epoch.

    ``digest``: hex digest of everything that the order depends on. ``samples_per_epoch``: samples when each document is
    read once. ``is_endless``: sample i is the same in any number of samples; not in Megatron-LM's orders.
    """

    is_endless: ClassVar[bool] = True

    def __init__(self, *, digest: str, samples_per_epoch: int, num_samples: int | None) -> None:
        self.digest, self.samples_per_epoch = digest, samples_per_epoch
        self.num_samples = samples_per_epoch if num_samples is None else num_samples

    def __len__(self) -> int:
        return self.num_samples

    def with_samples(self, num_samples: int) -> Self:
        """This order with another number of samples. Orders that depend on the number of samples can't change it."""
        assert self.is_endless, f"{type(self).__name__} depends on the number of its samples"
        other = copy(self)
        other.num_samples = num_samples
        return other

    def prepare(self) -> None:
        """Store all indices that the samples need in the cache; here, they were built with the order."""


class OrderedDataset(ABC):
    """Samples of ``documents`` in ``order``; a subclass defines what a sample is.

    ``first``: number of the document (or sentence) that the order calls 0, since it counts within a split.
    ``vocab_size``: check ids against it while reading, for data whose largest id is unknown; None: don't.
    """

    order: Order

    def __init__(self, documents: Documents, *, first: int = 0, vocab_size: int | None = None) -> None:
        self.documents, self._first, self._vocab_size = documents, first, vocab_size

    @property
    def digest(self) -> str:
        """Hex digest of what determines the samples."""
        return digest_of(self.order.digest, self.documents.fingerprint)

    @property
    def prefix(self) -> str:
        """The source's name for messages."""
        return self.documents.prefix

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int | None) -> Sample:
        if index is None:
            return self.without_loss(self[0])
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a data set of {len(self)}")
        return self.sample(index)

    @abstractmethod
    def sample(self, index: int) -> Sample:
        """Sample ``index``, which exists."""

    def without_loss(self, sample: Sample) -> Sample:
        """The sample with a loss mask of zeros, and all of it padding where it says how much is text."""
        return sample | {name: np.zeros_like(sample[name]) for name in ("loss_mask", TEXT_LENGTH) if name in sample}

    @abstractmethod
    def origin(self, index: int) -> str:
        """Where a sample's tokens are stored, for messages."""

    def describe(self) -> list[str]:
        """The source, in a line."""
        epochs = len(self) / max(self.order.samples_per_epoch, 1)
        return [f"{self.prefix}: {len(self):,} samples, {epochs:.2f} epochs"]

    def with_samples(self, num_samples: int) -> Self:
        """This data set with another number of samples, of which the common ones are unchanged."""
        other = copy(self)
        other.order = self.order.with_samples(num_samples)
        return other

    def prepare(self) -> None:
        """Store all indices that the samples need in the cache."""
        self.order.prepare()


def check_vocabulary(
    tokens: NDArray[np.int64], vocab_size: int, *, documents: Documents, document: int, offset: int
) -> None:
    """Raise DataError that names the first id outside the vocabulary and its place.

    ``tokens`` begin ``offset`` tokens into a document.
    """
    outside = tokens.view(np.uint64) >= vocab_size
    if outside.any():
        at = int(np.argmax(outside))
        raise DataError(
            f"{documents.prefix} holds token id {tokens[at]} (document {document}, token {offset + at}) but the "
            f"vocabulary has ids 0 to {vocab_size - 1}: the data was made with another tokenizer; give that one, or "
            "preprocess the text again"
        )
