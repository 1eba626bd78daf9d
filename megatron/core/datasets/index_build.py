"""Which tokens make up sample i: pure functions of document lengths and a seed.

The documents of an epoch are shuffled and read as one stream of T tokens. With sequence length L, sample k takes the
L + 1 tokens from position k·L: neighbours share one token, a label of the one and an input of the other. Then the
samples are shuffled.

In our order epochs are independent: an epoch's shuffles depend only on the seed and its number. It gives
N = (T − 1) // L samples, and the at most L remaining tokens are left out (other ones in each epoch). Sample i is number
i mod N of epoch i // N, so a longer run begins with a shorter one's samples, and no index grows with the run.

Megatron-LM's order shuffles all epochs of a run together, so every sample depends on how many the run asks for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Lengths = NDArray[np.int32]


@dataclass(frozen=True)
class SampleIndex:
    """Where samples start.

    ``documents`` [documents read]: document numbers in the order in which they are read.
    ``samples`` [samples, 2]: each sample's position in ``documents`` and offset in tokens, in training order.
    """

    documents: NDArray[Any]
    samples: NDArray[Any]


@dataclass(frozen=True)
class MegatronIndex:
    """Megatron-LM's three indices; ``starts`` [samples, 2] lacks the row that ends the last sample."""

    documents: NDArray[Any]
    starts: NDArray[Any]
    shuffle: NDArray[Any]

    def in_training_order(self) -> SampleIndex:
        """The samples in the order in which training reads them."""
        return SampleIndex(self.documents, self.starts[self.shuffle])


def num_samples_in(num_tokens: int, *, seq_length: int, drop_last_partial: bool = True, shared: int = 1) -> int:
    """Samples in a stream, where neighbours share ``shared`` tokens; a last one that lacks tokens may be dropped."""
    whole, rest = divmod(max(num_tokens - shared, 0), seq_length)
    return whole if drop_last_partial or rest == 0 else whole + 1


def random_state(seed: int, *parts: int) -> np.random.RandomState:
    """A generator that depends on all parts; NumPy guarantees that RandomState's numbers never change."""
    return np.random.RandomState(seed_words(seed, *parts))


def seed_words(seed: int, *parts: int) -> list[int]:
    """The seed of a RandomState that depends on all parts, each below 2^32."""
    return [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, *parts]


def build_epoch(
    lengths: Lengths,
    *,
    seed: int,
    epoch: int,
    seq_length: int,
    copy: int = 0,
    drop_last_partial: bool = True,
    shared: int = 1,
) -> SampleIndex:
    """Samples of one epoch in our order.

    ``lengths`` [documents] in tokens. ``copy`` distinguishes several uses of the same data set in one blend.
    ``shared``: tokens that neighbouring samples share, 1 in a stream of tokens, 0 in one of pairs of token and label.
    """
    random = random_state(seed, copy, epoch)
    documents = np.arange(len(lengths), dtype=_index_dtype(len(lengths)))
    random.shuffle(documents)
    starts = _sample_starts(
        lengths, documents, seq_length=seq_length, drop_last_partial=drop_last_partial, shared=shared
    )
    return SampleIndex(documents, starts[random.permutation(len(starts))])


def build_megatron(
    lengths: Lengths, *, seed: int, num_samples: int | None, seq_length: int, drop_last_partial: bool = True
) -> MegatronIndex:
    """Samples of a whole run in Megatron-LM's order; ``num_samples`` None means one epoch.

    The last epoch is shuffled separately when the run uses less than 80 % of it.
    """
    tokens = int(lengths.sum(dtype=np.int64))
    epochs, in_shuffled_together = 1, None
    if num_samples is not None:
        epochs = max(1, -(-(num_samples * seq_length + 1) // tokens))
    if epochs > 1 and num_samples is not None:
        before_last = ((epochs - 1) * tokens - 1) // seq_length
        if num_samples - before_last < int(0.80 * ((tokens - 1) // seq_length)):
            in_shuffled_together = before_last
    random = np.random.RandomState(seed)
    together = epochs if in_shuffled_together is None else epochs - 1
    once = np.arange(len(lengths), dtype=_index_dtype(len(lengths) * epochs))
    parts = [np.tile(once, together), np.tile(once, epochs - together)]
    for part in parts:
        random.shuffle(part)
    documents = np.concatenate(parts)
    starts = _sample_starts(lengths, documents, seq_length=seq_length, drop_last_partial=drop_last_partial)
    shuffle = np.arange(len(starts), dtype=np.uint32 if len(starts) < 2**32 - 2 else np.int64)
    random.shuffle(shuffle[:in_shuffled_together])
    if in_shuffled_together is not None:
        random.shuffle(shuffle[in_shuffled_together:])
    return MegatronIndex(documents, starts, shuffle)


def _sample_starts(
    lengths: Lengths, documents: NDArray[Any], *, seq_length: int, drop_last_partial: bool, shared: int = 1
) -> NDArray[Any]:
    """Position in ``documents`` and offset of each sample of the stream, [samples, 2], in stream order."""
    ends = np.require(lengths, requirements="A")[documents]  # in an index file they are not aligned
    total = int(ends.sum(dtype=np.int64))
    if total > np.iinfo(np.int32).max:
        ends = ends.astype(np.int64)
    np.cumsum(ends, out=ends)
    count = num_samples_in(total, seq_length=seq_length, drop_last_partial=drop_last_partial, shared=shared)
    positions = np.arange(count, dtype=ends.dtype) * seq_length
    found = np.searchsorted(ends, positions, side="right")  # the first document that ends after it
    before = np.where(found > 0, ends[found - 1], 0)
    return np.stack([found, positions - before], axis=1, dtype=_index_dtype(len(documents)), casting="unsafe")


def _index_dtype(count: int) -> type[np.signedinteger[Any]]:
    return np.int32 if count < np.iinfo(np.int32).max else np.int64
