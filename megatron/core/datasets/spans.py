"""Which sentences make up sample i of a masked data set: stretches of a document, about as long as a sample.

A sample has a target length: the longest possible, or, with a small probability, a random shorter one, so that a model
is also trained on short input. Sentences of a document are taken until the target is reached; its last sentence is
never a sample of its own. Documents with too few sentences are left out.

In our order a document's samples are the same in every epoch, and each epoch has them in another order. Megatron-LM's
order is one shuffled list for the whole run.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.index_build import SampleIndex, random_state, seed_words
from megatron.core.datasets.index_cache import IndexCache, digest_of
from megatron.core.datasets.sample_order import RecentEpochs
from megatron.core.datasets.samples import Order

_LONGEST_SENTENCE = 512  # tokens; Megatron-LM leaves out documents of several sentences with a longer one


class Span(NamedTuple):
    """Sentences ``first`` to ``stop`` (not included), to be cut to ``target`` tokens."""

    first: int
    stop: int
    target: int


@dataclass(frozen=True, kw_only=True)
class SpanRules:
    """``max_tokens`` and ``min_sentences`` of a sample, and the probability of a shorter target."""

    max_tokens: int
    min_sentences: int
    short_probability: float


@dataclass(frozen=True)
class Sentences:
    """Documents of sentences: ``lengths`` [sentences] in tokens, ``boundaries`` [documents + 1] in sentences."""

    lengths: NDArray[np.int32]
    boundaries: NDArray[np.int64]

    @property
    def starts(self) -> NDArray[np.int64]:
        """Tokens before each sentence, and all of them, [sentences + 1]."""
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])


def build_spans(sentences: Sentences, rules: SpanRules, *, seed: int, copy: int = 0) -> NDArray[Any]:
    """Samples of all documents once, [samples, 3] as in Span, in the order of the text.

    Each round takes the next sample of every document, so a round is a few array operations.
    """
    random, starts = random_state(seed, copy), sentences.starts
    firsts, ends = sentences.boundaries[:-1], sentences.boundaries[1:]
    active = ends - firsts >= rules.min_sentences
    firsts, ends = firsts[active], ends[active]
    rounds = [np.empty((0, 3), np.int64)]
    while len(firsts):
        short = random.random_sample(len(firsts)) < rules.short_probability
        targets = np.where(short, random.randint(2, rules.max_tokens + 1, len(firsts)), rules.max_tokens)
        stops = np.maximum(np.searchsorted(starts, starts[firsts] + targets), firsts + rules.min_sentences)
        stops = np.where(ends - stops > 1, stops, ends)
        rounds.append(np.stack([firsts, stops, targets], axis=1))
        more = stops < ends
        firsts, ends = stops[more], ends[more]
    spans = np.concatenate(rounds)
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    return spans.astype(np.int32 if len(sentences.lengths) < np.iinfo(np.int32).max else np.int64)


def build_megatron_spans(sentences: Sentences, rules: SpanRules, *, seed: int, num_samples: int | None) -> NDArray[Any]:
    """Samples of a whole run in Megatron-LM's order; it makes whole epochs, so there may be more than asked for."""
    starts, targets = sentences.starts.tolist(), _megatron_targets(rules, seed=seed)
    long_before = np.concatenate([[0], np.cumsum(sentences.lengths > _LONGEST_SENTENCE)])
    usable = [
        (first, end)
        for first, end in pairwise(sentences.boundaries.tolist())
        if end - first >= max(rules.min_sentences, 1) and (end - first == 1 or long_before[first] == long_before[end])
    ]
    found = list[Span]()
    while usable and (num_samples is None or len(found) < num_samples):
        for first, end in usable:
            target = next(targets)
            while first < end:
                stop = max(bisect_left(starts, starts[first] + target), first + rules.min_sentences)
                stop = stop if end - stop > 1 else end
                found.append(Span(first, stop, target))
                first, target = stop, next(targets)
        if num_samples is None:
            break
    rows = np.array(found, np.uint32 if len(sentences.lengths) <= np.iinfo(np.uint32).max else np.uint64).reshape(-1, 3)
    draws = mersenne_twister_64(seed + 1)
    for last in range(len(rows) - 1, 0, -1):  # Fisher and Yates' shuffle from the end
        other = next(draws) % (last + 1)
        rows[[last, other]] = rows[[other, last]]
    return rows


def _megatron_targets(rules: SpanRules, *, seed: int) -> Iterator[int]:
    """Megatron-LM's target lengths: a draw of the 32-bit Mersenne Twister each."""
    every = round(1 / rules.short_probability) if rules.short_probability > 0 else 0
    random = np.random.RandomState(seed)
    while True:
        for draw in random.randint(0, 1 << 32, 1024, np.uint32).tolist():
            is_short = every > 0 and draw % every == 0
            yield 2 + draw % (rules.max_tokens - 1) if is_short else rules.max_tokens


def mersenne_twister_64(seed: int) -> Iterator[int]:
    """Numbers of MT19937-64 (Nishimura 2000), which NumPy lacks."""
    size, half, everything = 312, 156, (1 << 64) - 1
    state = [seed & everything]
    for number in range(1, size):
        last = state[-1]
        state.append((6364136223846793005 * (last ^ (last >> 62)) + number) & everything)
    while True:
        for number in range(size):
            mixed = (state[number] & ~0x7FFFFFFF) | (state[(number + 1) % size] & 0x7FFFFFFF)
            odd = 0xB5026F5AA96619E9 if mixed & 1 else 0
            state[number] = state[(number + half) % size] ^ (mixed >> 1) ^ odd
        for word in state:
            word ^= (word >> 29) & 0x5555555555555555
            word ^= (word << 17) & 0x71D67FFFEDA60000
            word ^= (word << 37) & 0xFFF7EEE000000000 & everything
            yield (word ^ (word >> 43)) & everything


def _stored(build: Callable[[], NDArray[Any]], sentences: Sentences, *, digest: str, cache: IndexCache) -> NDArray[Any]:
    """The spans that ``build`` makes, read from the cache if they are there."""
    no_documents = np.empty(0, np.int32)
    rows = len(sentences.lengths)
    return cache.get(lambda: SampleIndex(no_documents, build()), rows=rows, inputs=(digest,)).samples


class SpanOrder(Order):
    """Sample i of a masked data set in our order."""

    def __init__(
        self,
        sentences: Sentences,
        rules: SpanRules,
        *,
        seed: int,
        num_samples: int | None,
        cache: IndexCache,
        copy: int = 0,
    ) -> None:
        self._seed, self._copy = seed, copy
        # Reseeded for each sample, as creating one takes as long as a sample.
        self._generator = np.random.RandomState(0)
        digest = digest_of("spans", sentences.lengths, sentences.boundaries, seed, copy, sorted(asdict(rules).items()))
        build = partial(build_spans, sentences, rules, seed=seed, copy=copy)
        self._spans = _stored(build, sentences, digest=digest, cache=cache)
        super().__init__(digest=digest, samples_per_epoch=len(self._spans), num_samples=num_samples)
        self._shuffled = RecentEpochs(self._shuffle)

    def _shuffle(self, epoch: int) -> NDArray[np.int64]:
        return random_state(self._seed, self._copy, epoch).permutation(self.samples_per_epoch)

    def find(self, index: int) -> Span:
        """Sentences of sample ``index``."""
        epoch, number = divmod(index, self.samples_per_epoch)
        return Span(*self._spans[self._shuffled[epoch].item(number)].tolist())

    def random(self, index: int) -> np.random.RandomState:
        """Random numbers of sample ``index``, valid until the next call."""
        self._generator.seed(seed_words(self._seed, self._copy, index & 0xFFFFFFFF, index >> 32))
        return self._generator


class MegatronSpanOrder(Order):
    """Megatron-LM's samples and their random numbers."""

    is_endless = False

    def __init__(
        self, sentences: Sentences, rules: SpanRules, *, seed: int, num_samples: int | None, cache: IndexCache
    ) -> None:
        self._seed, self._generator = seed, np.random.RandomState(0)
        inputs = (sentences.lengths, sentences.boundaries, seed, num_samples, sorted(asdict(rules).items()))
        digest = digest_of("megatron-spans", *inputs)
        build = partial(build_megatron_spans, sentences, rules, seed=seed, num_samples=num_samples)
        self._spans = _stored(build, sentences, digest=digest, cache=cache)
        super().__init__(digest=digest, samples_per_epoch=len(self._spans), num_samples=None)

    def find(self, index: int) -> Span:
        """Sentences of sample ``index``."""
        return Span(*self._spans[index].tolist())

    def random(self, index: int) -> np.random.RandomState:
        """Random numbers of sample ``index``, valid until the next call."""
        self._generator.seed((self._seed + index) % 2**32)
        return self._generator
