"""Samples: consecutive segments of the stream of documents, each with a factorization order of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from megatron.config.run import RunConfig
from megatron.core.datasets.build import Part, ShortSplitError, Source
from megatron.core.datasets.index_build import random_state
from megatron.core.datasets.index_cache import IndexCache
from megatron.core.datasets.mock import MockDocuments
from megatron.core.datasets.samples import Documents, Sample
from megatron.core.datasets.token_stream import StreamDataset, stream_order
from xlnet.config import XLNetConfig

if TYPE_CHECKING:
    from megatron.core.tokenizers.base import Tokenizer

_STREAM = 0x71E7
GIVEN = -1
"""Rank of the tokens that aren't predicted: they come first in the order and all see each other."""


@dataclass(frozen=True)
class Factorization:
    """Draws which tokens of a segment are predicted, and in which order: the last ``num_predict`` of a permutation.

    They lie in spans of 1 to ``max_gram`` tokens, each somewhere within a context that is longer by as much as there
    are more tokens than predicted ones. Single tokens are added where spans are too few.
    """

    num_predict: int
    max_gram: int

    def __call__(
        self, can_be_predicted: NDArray[np.bool_], random: np.random.RandomState
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
        """Ranks of all tokens, and places and loss mask of the predicted ones.

        Ranks [S] are ``GIVEN`` unless a token is predicted. Places [P] are sorted by rank. The mask [P] is 1 for all,
        unless too few tokens can be predicted.
        """
        length, wanted = len(can_be_predicted), self.num_predict
        chosen, at = np.zeros(length, bool), 0
        sizes = np.arange(1, self.max_gram + 1)
        while (missing := wanted - int(chosen.sum())) > 0:
            size = min(int(random.choice(sizes, p=1 / sizes / (1 / sizes).sum())), missing)
            around = round(size * (length / wanted - 1))
            start = at + random.randint(around + 1)
            if start + size > length:
                break
            chosen[start : start + size] = can_be_predicted[start : start + size]
            at += size + around
        spare = random.permutation(np.flatnonzero(can_be_predicted & ~chosen))
        chosen[spare[: wanted - int(chosen.sum())]] = True
        found = random.permutation(np.flatnonzero(chosen))
        ranks, places = np.full(length, GIVEN, np.int64), np.zeros(wanted, np.int64)
        ranks[found], places[: len(found)] = np.arange(len(found)), found
        return ranks, places, (np.arange(wanted) < len(found)).astype(np.float32)


class SegmentDataset(StreamDataset):
    """Samples of consecutive segments.

    ``tokens`` and ``documents`` [segments, S]: ids, and the number of each token's document in the sample; ``ranks``
    [segments, S]: places in the factorization order; ``places``, ``labels`` and ``loss_mask`` [segments, P]: what is
    predicted, in this order. All depends on the seed, ``copy`` (which of several uses of the data), the number of the
    sample and the documents alone. The end of a document is never predicted.
    """

    def __init__(self, *given: Any, run: RunConfig, copy: int, eod: int, **where: Any) -> None:
        super().__init__(*given, **where)
        own = run.group(XLNetConfig)
        self._shape = (own.segments_per_sample, run.data.seq_length)
        self._seed, self._copy, self._eod = run.training.seed, copy, eod
        self._factorization = Factorization(own.num_predict, own.max_gram)

    @override
    def sample(self, index: int) -> Sample:
        """The tokens of a sample's segments, and a factorization order of each."""
        segments, length = self._shape
        tokens, num_tokens = self.read(index, segments * length)
        is_eod = tokens == self._eod
        can_be_predicted = (~is_eod & (np.arange(len(tokens)) < num_tokens)).reshape(self._shape)
        random = random_state(self._seed, _STREAM, self._copy, index & 0xFFFFFFFF, index >> 32)
        drawn = [self._factorization(each, random) for each in can_be_predicted]
        ranks, places, loss_mask = (np.stack(each) for each in zip(*drawn))
        ranks.reshape(-1)[num_tokens:] = self._factorization.num_predict  # padding, which nothing sees
        tokens = tokens.reshape(self._shape)
        return {
            "tokens": tokens,
            "documents": (np.cumsum(is_eod) - is_eod).reshape(self._shape),
            "ranks": ranks,
            "places": places,
            "labels": np.take_along_axis(tokens, places, axis=1),
            "loss_mask": loss_mask,
        }


class SegmentDatasets:
    """Data sets of an XLNet; ``--split`` counts sequences."""

    def __init__(self, run: RunConfig, tokenizer: Tokenizer) -> None:
        self._run, self._eod = run, tokenizer.eod

    def mock(self) -> Source:
        """Documents that count 1, 2, 3 …"""
        assert self._run.model.vocab_size is not None
        documents = MockDocuments(eod=self._eod, vocab_size=self._run.model.vocab_size)
        return Source(documents, IndexCache(None), ids_known=True)

    def count_units(self, documents: Documents) -> int:
        """Number of sequences."""
        return len(documents.lengths)

    def dataset(self, part: Part, num_samples: int | None, *, remedy: str) -> SegmentDataset:
        """Samples of a part; raises ShortSplitError when it has too few tokens for one."""
        run, source, needed = self._run, part.source, self._run.tokens_per_sample + 1
        lengths = source.documents.lengths[part.units.start : part.units.stop]
        if (tokens := int(lengths.sum(dtype=np.int64))) < needed:
            raise ShortSplitError(
                f"{source.documents.prefix}: the {part.split} split has {tokens} tokens, but a sample takes {needed} "
                f"(--segments-per-sample x --seq-length, and one more): give {remedy}, or a smaller --seq-length"
            )
        order = stream_order(
            part, run.data, seed=run.training.seed, seq_length=run.tokens_per_sample, num_samples=num_samples
        )
        vocab_size = None if source.ids_known else run.model.vocab_size
        return SegmentDataset(
            source.documents,
            order,
            run=run,
            copy=part.copy,
            eod=self._eod,
            first=part.units.start,
            vocab_size=vocab_size,
        )
