"""The mixes that a run has trained on, one after the other, so that changing the mix neither skips nor repeats.

A phase is a mix and the sample of the run it began with. How many samples of each source a phase took follows from its
weights and its length alone, so a source goes on after what all phases before took of it. Sources are recognised by the
digest of their order, not by their paths: data that moved go on, other data begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron.core.datasets.blend import interleave


@dataclass(frozen=True)
class MixedSource:
    """A source of a mix: ``digest`` of its sample order, its prefix for people, and its share of the mix."""

    digest: str
    prefix: str
    weight: float


@dataclass(frozen=True)
class Phase:
    """``sources`` mixed from sample ``start`` of the run on."""

    start: int
    sources: tuple[MixedSource, ...]

    def same_mix(self, other: Phase) -> bool:
        """Whether both take the same from the same sources, wherever those lie."""
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
    """The phases of a run that goes on with ``mix`` after ``consumed`` samples: one more if the mix is another."""
    now = Phase(consumed, tuple(mix))
    if phases and phases[-1].same_mix(now):
        return list(phases)
    return [*(phase for phase in phases if phase.start < consumed), now]
