"""Several data sets as one, mixed in given proportions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.datasets.blend import Interleaving, normalized
from megatron.core.datasets.gpt_samples import GPTDataset, Sample
from megatron.core.datasets.index_cache import digest_of


@dataclass(frozen=True)
class SourceShare:
    """A source's part of a blend, as asked and as the samples turn out; fractions of 1."""

    prefix: str
    asked: float
    realised: float
    num_samples: int


class BlendedDataset:
    """Sample i is the next unused sample of the source that ``interleaving`` names for position i."""

    def __init__(self, sources: Sequence[GPTDataset], interleaving: Interleaving, *, weights: Sequence[float]) -> None:
        self.sources = list(sources)
        self._interleaving = interleaving
        self._asked = normalized(weights)

    @property
    def digest(self) -> str:
        """Hex digest of what decides which samples are read."""
        return digest_of("blend", self._asked, len(self), *(source.digest for source in self.sources))

    @property
    def shares(self) -> list[SourceShare]:
        """Asked and realised part of each source."""
        counts = self._interleaving.counts
        return [
            SourceShare(source.documents.prefix, float(asked), int(count) / max(len(self), 1), int(count))
            for source, asked, count in zip(self.sources, self._asked, counts)
        ]

    def __len__(self) -> int:
        return len(self._interleaving)

    def __getitem__(self, index: int | None) -> Sample:
        if index is None:
            return self.sources[0][None]
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a blend of {len(self)}")
        source, number = self._interleaving.locate(index)
        return self.sources[source][number]

    def origin(self, index: int) -> str:
        """Source, document and token at which sample ``index`` starts."""
        source, number = self._interleaving.locate(index)
        return self.sources[source].origin(number)

    def describe(self) -> list[str]:
        """Asked and realised share of each source, a line each."""
        return [
            f"{share.realised:7.3%} of the blend (asked {share.asked:.3%}) from {line}"
            for share, source in zip(self.shares, self.sources)
            for line in source.describe()
        ]
