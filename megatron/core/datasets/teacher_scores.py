"""A teacher's distributions, stored once for the samples of a run.

Of each token there are the likeliest ids, and all others as one.

A folder holds ``scores.json`` and, for each data set, arrays with a row a sample: ``ids`` int32 [n, S, k],
``log_probs`` [n, S, k] and ``rest`` [n, S] of floating type, and ``seen`` uint64 [n], a digest of what the teacher read
of the sample: its tokens, their positions and their documents.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.samples import Sample, SampleDataset
from megatron.core.files.durable import write_errors
from megatron.errors import DataError
from megatron.small_files import Between, check_kinds, read_json

FILE = "scores.json"
FORMAT = 2
_IDS, _LOG_PROBS, _REST, _SEEN = "ids", "log_probs", "rest", "seen"

TEACHER_IDS, TEACHER_LOG_PROBS, TEACHER_REST = "teacher_ids", "teacher_log_probs", "teacher_rest"
"""Fields of a sample with what its teacher said: [S, k], [S, k] and [S]."""

NUMBER, SEEN, PLACES = "sample_number", "sample_digest", "sample_places"
"""Fields of a sample that is being scored: its number and digest [1], and the places of its tokens [S]."""

_REMEDY = "give --scores another folder"
_ROUNDED = 0.05  # more than stored logarithms of 16 bits move the sum of their probabilities
_Size = Annotated[int, Between(1, 2**31 - 1)]


@dataclass(frozen=True, kw_only=True)
class ScoresHeader:
    """What was scored, by what, and how. ``samples``: how many of each data set, ``SPLIT`` or ``SPLIT-NAME``.

    ``teacher``: its place. ``fingerprint``: a digest of its files' names and sizes, and of the small ones' bytes.
    ``tokenizer``: the fingerprint of the run's. ``log_probs``: type of the stored logarithms.
    """

    teacher: str
    fingerprint: str
    tokenizer: str
    vocab_size: int
    seq_length: int
    top_k: int
    temperature: float
    log_probs: str
    samples: Mapping[str, int]

    def write(self, folder: Path) -> None:
        """Write it beside its arrays, last of all: a folder without it is not complete."""
        (folder / FILE).write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n", encoding="utf-8")


def read_header(folder: Path) -> ScoresHeader:
    """The header of a folder; DataError for one that is missing, incomplete or of another format."""
    where = f"--teacher-scores {folder}"
    if not (folder / FILE).is_file():
        raise DataError(f"{where} has no {FILE}: run tools/score_with_teacher.py until it ends")
    found: dict[str, Any] = read_json(folder / FILE, dict[str, Any], error=DataError)
    texts = dict.fromkeys(("teacher", "fingerprint", "tokenizer", "log_probs"), str)
    sizes = dict.fromkeys(("format", "vocab_size", "seq_length", "top_k"), _Size)
    kinds = {**texts, **sizes, "temperature": float, "samples": dict[str, int]}
    if lacking := [name for name in kinds if name not in found]:
        raise DataError(f"{where}/{FILE} lacks {lacking[0]}, so it is damaged: score the data again")
    check_kinds(found, kinds, where=f"{where}/{FILE}", error=DataError)
    if found.pop("format") != FORMAT or found["log_probs"] not in ("float16", "float32", "float64"):
        raise DataError(f"{where}/{FILE} was written by another version: score the data again")
    return ScoresHeader(**found)


class ScoreArrays:
    """The arrays of one data set, mapped from their files."""

    def __init__(self, folder: Path, header: ScoresHeader, data: str) -> None:
        self.header, self.data = header, data
        rows = header.samples[data]
        shapes = _shapes(header, rows)
        self._arrays = dict[str, NDArray[Any]]()
        for name, (shape, dtype) in shapes.items():
            path = _file(folder, data, name)
            wanted, there = int(np.prod(shape)) * dtype.itemsize, path.stat().st_size if path.is_file() else 0
            if wanted != there:
                raise DataError(
                    f"--teacher-scores {path} has {there:,} bytes instead of {wanted:,}: score the data again"
                )
            self._arrays[name] = np.memmap(path, dtype=dtype, mode="r", shape=shape)

    def row(self, number: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Ids, their log-probabilities, and the rest, of one sample."""
        return self._arrays[_IDS][number], self._arrays[_LOG_PROBS][number], self._arrays[_REST][number]

    def seen(self, number: int) -> int:
        """The digest of what was scored as this sample."""
        return int(self._arrays[_SEEN][number])


class ScoreWriter:
    """Writes rows into the files that ``make_files`` made. Ranks write parts of the same files: each its own bytes, and
    no whole pages, which on a network's file system would overwrite those of others.
    """

    def __init__(self, folder: Path, header: ScoresHeader, data: str) -> None:
        self.header, self._folder = header, folder
        self._shapes = _shapes(header, header.samples[data])
        with write_errors(folder, remedy=_REMEDY):
            self._files = {name: os.open(_file(folder, data, name), os.O_WRONLY) for name in self._shapes}

    def store(
        self, number: int, digest: int, places: NDArray[Any], ids: NDArray[Any], logs: NDArray[Any], rest: NDArray[Any]
    ) -> None:
        """Store the distributions of some ``places`` of a sample. Raises DataError where they can't be written."""
        cuts = np.flatnonzero(np.diff(places) != 1) + 1  # of a context-parallel rank, two runs of places
        runs = np.split(np.arange(len(places)), cuts)
        with write_errors(self._folder, remedy=_REMEDY):
            for name, values in ((_IDS, ids), (_LOG_PROBS, logs), (_REST, rest)):
                for run in runs:
                    self._write(name, number, int(places[run[0]]), values[run])
            self._write(_SEEN, number, 0, np.array([digest], np.uint64))

    def _write(self, name: str, number: int, place: int, values: NDArray[Any]) -> None:
        (_, *inner), dtype = self._shapes[name]
        size = math.prod(inner[1:]) * dtype.itemsize  # of a token
        start = number * math.prod(inner) * dtype.itemsize + place * size
        written = memoryview(np.ascontiguousarray(values, dtype).tobytes())
        while written:
            count = os.pwrite(self._files[name], written, start)
            written, start = written[count:], start + count

    def close(self) -> None:
        """End writing: what was stored is on the disk."""
        with write_errors(self._folder, remedy=_REMEDY):
            for file in self._files.values():
                os.fsync(file)
                os.close(file)


def make_files(folder: Path, header: ScoresHeader) -> None:
    """Files of the right size for all data sets, of zeros, for which the disk has room; raises DataError where they
    can't be written.
    """
    with write_errors(folder, remedy=_REMEDY):
        folder.mkdir(parents=True, exist_ok=True)
        sizes = {
            _file(folder, data, name): math.prod(shape) * dtype.itemsize
            for data, rows in header.samples.items()
            for name, (shape, dtype) in _shapes(header, rows).items()
        }
        needed, free = sum(sizes.values()), shutil.disk_usage(folder).free
        if needed > free:
            raise DataError(
                f"--scores {folder}: {needed / 1e9:,.1f} GB are needed and {free / 1e9:,.1f} GB are free there; give "
                "another folder or a smaller --top-k"
            )
        for file, size in sizes.items():
            with file.open("wb") as opened:
                if size and hasattr(os, "posix_fallocate"):  # macOS has none
                    os.posix_fallocate(opened.fileno(), 0, size)
                opened.truncate(size)


def _file(folder: Path, data: str, name: str) -> Path:
    return folder / f"{data}.{name}.bin"


def _shapes(header: ScoresHeader, rows: int) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    length, top, logs = header.seq_length, header.top_k, np.dtype(header.log_probs)
    return {
        _IDS: ((rows, length, top), np.dtype(np.int32)),
        _LOG_PROBS: ((rows, length, top), logs),
        _REST: ((rows, length), logs),
        _SEEN: ((rows,), np.dtype(np.uint64)),
    }


def data_name(split: str, name: str) -> str:
    """What a data set of a split is called in files."""
    return f"{split}-{name}" if name else split


def digest_of_sample(sample: Sample) -> int:
    """A number that tells apart samples of which a model says different things, not 0.

    Positions that aren't given are 0, 1, …, and without documents all tokens are of document 0.
    """
    tokens = sample["tokens"]
    positions = sample.get("position_ids", np.arange(len(tokens)))
    documents = sample.get("document_ids", np.zeros(len(tokens)))
    found = hashlib.blake2b(digest_size=8)
    for each in (tokens, positions, documents):
        found.update(np.ascontiguousarray(each, dtype=np.int64).tobytes())
    return int.from_bytes(found.digest(), "little") or 1


class NumberedSamples:
    """Samples that are to be scored: with their numbers, digests and places. A sample that fills a batch is -1."""

    def __init__(self, dataset: SampleDataset) -> None:
        self._dataset = dataset

    @property
    def digest(self) -> str:
        """The data set's digest."""
        return self._dataset.digest

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int | None) -> Sample:
        sample = self._dataset[index]
        number = np.array([-1 if index is None else index], dtype=np.int64)
        digest = np.array([digest_of_sample(sample)], dtype=np.uint64).view(np.int64)
        places = np.arange(len(sample["tokens"]), dtype=np.int64)
        return {**sample, NUMBER: number, SEEN: digest, PLACES: places}

    def origin(self, index: int) -> str:
        """Where a sample's tokens are stored."""
        return self._dataset.origin(index)

    def describe(self) -> list[str]:
        """The data set's sources."""
        return self._dataset.describe()


class ScoredSamples:
    """Samples with what the teacher said of them. Raises DataError for a sample that was not scored, or is another."""

    def __init__(self, dataset: SampleDataset, scores: ScoreArrays, *, where: str) -> None:
        self._dataset, self._scores, self._where = dataset, scores, where
        for number in {0, min(len(dataset), scores.header.samples[scores.data]) - 1}:
            self[number]

    @property
    def digest(self) -> str:
        """The data set's digest."""
        return self._dataset.digest

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int | None) -> Sample:
        sample, header = self._dataset[index], self._scores.header
        if index is not None and index >= header.samples[self._scores.data]:
            raise DataError(
                f"{self._where} has the first {header.samples[self._scores.data]:,} samples of {self._scores.data}, "
                f"and this run reads sample {index:,}: score them with the flags of this run"
            )
        if index is not None and self._scores.seen(index) != digest_of_sample(sample):
            raise DataError(
                f"{self._where} was made of other data: its sample {index:,} of {self._scores.data} has other tokens, "
                f"positions or documents than this run's ({self._dataset.origin(index)}); score the data with the "
                "flags of this run, --reset-position-ids and --reset-attention-mask included"
            )
        ids, logs, rest = self._scores.row(index or 0)
        self._check(index or 0, ids, logs, rest)
        return {**sample, TEACHER_IDS: ids, TEACHER_LOG_PROBS: logs, TEACHER_REST: rest}

    def _check(self, index: int, ids: NDArray[Any], logs: NDArray[Any], rest: NDArray[Any]) -> None:
        """Raise DataError where a row is no distribution over the vocabulary, as the disk or a copy has damaged it."""
        header = self._scores.header
        with np.errstate(over="ignore"):
            totals = np.exp(logs, dtype=np.float32).sum(axis=1) + np.exp(rest, dtype=np.float32)
        wrong = ~(np.abs(totals - 1) < _ROUNDED) | (ids < 0).any(axis=1) | (ids >= header.vocab_size).any(axis=1)
        if wrong.any():
            place = int(np.argmax(wrong))
            raise DataError(
                f"{self._where} is damaged: what it has of token {place} of sample {index:,} of {self._scores.data} "
                f"is no distribution over {header.vocab_size:,} ids; copy the folder again, or score the data again"
            )

    def origin(self, index: int) -> str:
        """Where a sample's tokens are stored."""
        return self._dataset.origin(index)

    def describe(self) -> list[str]:
        """The data set's sources."""
        return self._dataset.describe()
