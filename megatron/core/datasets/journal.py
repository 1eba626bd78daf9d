"""The finished part of a long conversion of text to data sets, so that an interrupted one continues from there.

The journal says how far into the input the output reaches, and how long the output is there. It is valid only for the
same settings and for input files that are unchanged up to that place; what was written after it is written again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.metadata import DatasetMetadata
from megatron.core.files.durable import replaced_file, write_errors
from megatron.core.files.remote_path import RemotePath, is_url
from megatron.core.tokenizers.input_files import STDIN
from megatron.core.tokenizers.line_batches import Position
from megatron.errors import DataError
from megatron.small_files import VOCABULARY_BYTES, read_json

_EXACT_BITS = 12


@dataclass
class LengthHistogram:
    """Number of documents by length in tokens: exact up to 4,095, longer ones to 12 binary digits.

    ``longest`` is exact.
    """

    counts: dict[int, int] = field(default_factory=dict)
    longest: int = 0

    def __post_init__(self) -> None:
        self.counts = {int(length): count for length, count in self.counts.items()}  # keys from JSON are text

    def add(self, lengths: NDArray[np.int64]) -> None:
        """Count documents."""
        self.longest = max(self.longest, int(lengths.max(initial=0)))
        digits = np.frexp(lengths.astype(np.float64))[1]
        shift = np.maximum(digits - _EXACT_BITS, 0)
        values, times = np.unique(lengths >> shift << shift, return_counts=True)
        for value, count in zip(values.tolist(), times.tolist()):
            self.counts[value] = self.counts.get(value, 0) + count

    def merge(self, other: LengthHistogram) -> None:
        """Count the documents of another histogram, too."""
        self.longest = max(self.longest, other.longest)
        for length, count in other.counts.items():
            self.counts[length] = self.counts.get(length, 0) + count

    def percentiles(self, *shares: float) -> list[int]:
        """The least length that each percentage in ``shares`` of the documents doesn't exceed; [] without documents."""
        values = np.array(sorted(self.counts), np.int64)
        reached = np.cumsum([self.counts[value] for value in values.tolist()])
        if not len(values):
            return []
        places = np.searchsorted(reached, np.array(shares) / 100 * reached[-1])
        return [self.longest if share == 100 else int(values[place]) for share, place in zip(shares, places)]


@dataclass
class SourceCounts:
    """What came from one source: a path, folder or glob of --input; ``tokens`` by key."""

    documents: int = 0
    bad_lines: int = 0
    text_bytes: int = 0
    tokens: dict[str, int] = field(default_factory=dict)

    def add(self, other: SourceCounts) -> None:
        """Count what another part of the input has from this source."""
        self.documents += other.documents
        self.bad_lines += other.bad_lines
        self.text_bytes += other.text_bytes
        for key, count in other.tokens.items():
            self.tokens[key] = self.tokens.get(key, 0) + count


@dataclass
class Totals:
    """Counts of a conversion so far; ``tokens`` and ``lengths`` by key, ``sources`` by their names.

    ``empty``: texts without a token. ``bad``: lines that hold no document.
    """

    documents: int = 0
    empty: int = 0
    bad: int = 0
    text_bytes: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    lengths: dict[str, LengthHistogram] = field(default_factory=dict)
    sources: dict[str, SourceCounts] = field(default_factory=dict)

    def add_source(self, source: str, counts: SourceCounts) -> None:
        """Count a batch of documents and lines of ``source``."""
        self.documents += counts.documents
        self.bad += counts.bad_lines
        self.text_bytes += counts.text_bytes
        self.sources.setdefault(source, SourceCounts()).add(counts)

    def add(self, other: Totals) -> None:
        """Count another part of the input."""
        for source, counts in other.sources.items():
            self.add_source(source, counts)
        self.empty += other.empty
        for key, count in other.tokens.items():
            self.tokens[key] = self.tokens.get(key, 0) + count
            self.lengths.setdefault(key, LengthHistogram()).merge(other.lengths[key])

    def add_documents(self, key: str, lengths: NDArray[np.int64]) -> None:
        """Count the documents of one key by their lengths in tokens."""
        self.empty += int(np.count_nonzero(lengths == 0))
        self.tokens[key] = self.tokens.get(key, 0) + int(lengths.sum())
        self.lengths.setdefault(key, LengthHistogram()).add(lengths)


@dataclass(frozen=True)
class Milestone:
    """``position`` in the input, the output's counts there by prefix, and all counts up to there."""

    position: Position
    bytes_read: int
    outputs: Mapping[str, DatasetMetadata]
    totals: Totals


@dataclass(frozen=True)
class _Entry(Milestone):
    """What the file holds: a milestone, the settings, and name, size and modification time of each input file."""

    settings: Any
    inputs: Any


class Journal:
    """The last milestone of a run that turns ``inputs`` into data sets with ``settings``, in the file ``path``.

    Input from a pipe can't be read again; then there is no journal.
    """

    def __init__(self, path: Path, *, settings: Mapping[str, Any], inputs: Sequence[str]) -> None:
        self.path, self._settings, self._inputs = path, json.loads(json.dumps(settings)), inputs
        self.possible = STDIN not in inputs and all(is_url(each) or Path(each).is_file() for each in inputs)

    def read(self) -> Milestone | None:
        """Where to continue; None when there is no journal, or it belongs to another run."""
        try:
            saved: _Entry = read_json(self.path, _Entry, error=DataError, most_bytes=VOCABULARY_BYTES)
            same = saved.settings == self._settings and saved.inputs == self._files(saved.position)
            return saved if same and self.possible else None
        except (OSError, DataError, ValueError):
            return None

    def write(self, milestone: Milestone) -> None:
        """Record a milestone; raises DataError when the disk is full."""
        entry = _Entry(
            milestone.position,
            milestone.bytes_read,
            {prefix: replace(metadata, tokenizer=None) for prefix, metadata in milestone.outputs.items()},
            milestone.totals,
            settings=self._settings,
            inputs=self._files(milestone.position),
        )
        with write_errors(self.path), replaced_file(self.path) as aside:
            aside.write_text(json.dumps(asdict(entry)), encoding="utf-8")

    def remove(self) -> None:
        """Delete the journal: the output is complete, or the run starts again."""
        with write_errors(self.path):
            self.path.unlink(missing_ok=True)

    def _files(self, position: Position) -> list[list[Any]]:
        """Name, size and modification time of the files up to ``position``; of a URL what its listing says."""
        return [[each, *_state(each)] for each in self._inputs[: position.file + 1]]


def _state(path: str) -> tuple[Any, ...]:
    if is_url(path):
        return (RemotePath(path).version(),)
    found = Path(path).stat()
    return found.st_size, found.st_mtime_ns
