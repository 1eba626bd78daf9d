"""Several data sets as one, mixed in given proportions, and the mixes that a run has trained on one after the other.

So that changing the mix neither skips nor repeats samples, a run records its mixes as phases. How many samples of each
source a phase takes depends on its weights and its length alone, so each source continues after what all earlier phases
took of it. Sources are identified by the digest of their order, not by their paths: moved data continue, other data
begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron.core.datasets.blend import Interleaving, interleave
from megatron.core.datasets.index_cache import digest_of
from megatron.core.datasets.samples import Sample, SourceDataset


@dataclass(frozen=True)
class MixedSource:
    """A source of a mix: ``digest`` of its sample order, its prefix for messages, and its share of the mix."""

    digest: str
    prefix: str
    weight: float


@dataclass(frozen=True)
class Phase:
    """``sources`` mixed from sample ``start`` of the run on."""

    start: int
    sources: tuple[MixedSource, ...]

    def same_mix(self, other: Phase) -> bool:
        """Whether both take the same from the same sources, wherever those are stored."""
        return [(each.digest, each.weight) for each in self.sources] == [
            (each.digest, each.weight) for each in other.sources
        ]

    def to_json(self) -> dict[str, Any]:
        """The phase, for a checkpoint."""
        return {**asdict(self), "sources": [asdict(source) for source in self.sources]}


def samples_taken(phases: Sequence[Phase], *, until: int) -> dict[str, int]:
    """Samples of each source, by digest, that were taken before sample ``until`` of the run."""
    taken: dict[str, int] = {}
    ends = [phase.start for phase in phases[1:]] + [until]
    for phase, end in zip(phases, ends):
        counts = interleave([each.weight for each in phase.sources], size=end - phase.start).counts
        for source, count in zip(phase.sources, counts.tolist()):
            taken[source.digest] = taken.get(source.digest, 0) + count
    return taken


def next_phases(phases: Sequence[Phase], mix: Sequence[MixedSource], *, consumed: int) -> list[Phase]:
    """The phases of a run that continues with ``mix`` after ``consumed`` samples: one more if the mix has changed."""
    now = Phase(consumed, tuple(mix))
    if phases and phases[-1].same_mix(now):
        return list(phases)
    return [*(phase for phase in phases if phase.start < consumed), now]


class BlendedDataset:
    """Sample i is the next unused sample of the source that ``interleaving`` gives for position i − ``start``.

    ``shares`` [sources]: the part of each that was asked for, with which ``interleaving`` was made.
    ``start``: the run's sample at which this mix begins; earlier ones belong to other mixes and can't be read here.
    ``taken`` [sources]: how many samples of each source the earlier mixes took.
    """

    def __init__(
        self,
        sources: Sequence[SourceDataset],
        interleaving: Interleaving,
        *,
        shares: Sequence[float],
        start: int = 0,
        taken: Sequence[int] | None = None,
    ) -> None:
        self.sources = list(sources)
        self._interleaving, self._start = interleaving, start
        self._taken = list(taken or [0] * len(self.sources))
        self._asked = list(shares)

    @property
    def digest(self) -> str:
        """Hex digest of what determines the samples."""
        place = (self._start, self._taken) if self._start else ()
        return digest_of("blend", self._asked, len(self), *place, *(source.digest for source in self.sources))

    @property
    def mix(self) -> list[MixedSource]:
        """The sources and their weights, as a phase of a run records them."""
        digests = [source.digest for source in self.sources]
        return [
            MixedSource(f"{digest}{'+' * digests[:place].count(digest)}", source.prefix, weight)  # of equal files, each
            for place, (digest, source, weight) in enumerate(zip(digests, self.sources, self._asked))
        ]

    def __len__(self) -> int:
        return self._start + len(self._interleaving)

    def __getitem__(self, index: int | None) -> Sample:
        if index is None:
            return self.sources[0][None]
        source, number = self._locate(index)
        return self.sources[source][number]

    def origin(self, index: int) -> str:
        """Source, document and token where sample ``index`` starts."""
        source, number = self._locate(index)
        return self.sources[source].origin(number)

    def _locate(self, index: int) -> tuple[int, int]:
        if not self._start <= index < len(self):
            first = f", which begins at {self._start}" if self._start else ""
            raise IndexError(f"sample {index} of a blend of {len(self)}{first}")
        source, number = self._interleaving.locate(index - self._start)
        return source, self._taken[source] + number

    def prepare(self) -> None:
        """Store all indices that the samples need in the sources' caches."""
        for source in self.sources:
            source.prepare()

    def describe(self) -> list[str]:
        """Asked and realised share of each source, a line each."""
        total = max(len(self._interleaving), 1)
        return [
            f"{count / total:7.3%} of the blend (asked {asked:.3%}) from {line}"
            for source, asked, count in zip(self.sources, self._asked, self._interleaving.counts.tolist())
            for line in source.describe()
        ]


MixedDataset = SourceDataset | BlendedDataset
"""Training data: one source, or several mixed."""


def mix_of(dataset: MixedDataset) -> list[MixedSource]:
    """The mix of the training data, also of a single source."""
    if isinstance(dataset, BlendedDataset):
        return dataset.mix
    return [MixedSource(dataset.digest, dataset.prefix, 1.0)]


def continue_phases(dataset: MixedDataset, phases: Sequence[Phase]) -> MixedDataset:
    """Training data for the last of ``phases``; each source continues after what the earlier phases took of it.

    ``dataset``: the data of a run that has only the last mix, which is returned where there is no earlier phase.
    """
    *before, now = phases
    if not before:
        return dataset
    sources = dataset.sources if isinstance(dataset, BlendedDataset) else [dataset]
    shares = [each.weight for each in now.sources]
    mixed = interleave(shares, size=len(dataset) - now.start)
    by_digest = samples_taken(before, until=now.start)
    taken = [by_digest.get(each.digest, 0) for each in now.sources]
    longer = [source.with_samples(had + more) for source, had, more in zip(sources, taken, mixed.counts.tolist())]
    return BlendedDataset(longer, mixed, shares=shares, start=now.start, taken=taken)
