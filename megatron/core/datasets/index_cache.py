"""Keep built indices on disk, so that the ranks of a machine share one copy and the next run starts at once.

A file's name is a digest of everything its content follows from, so a cache cannot be stale: paths, run length and
batch size play no part, and whoever writes the same name writes the same bytes.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from megatron.core.datasets.files import replaced_file
from megatron.core.datasets.index_build import SampleIndex

_FORMAT = 1  # part of every name: raise it when an index of the same inputs changes
_log = logging.getLogger(__name__)


def digest_of(*parts: object) -> str:
    """Hex digest of printable values and arrays."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        part = part.item() if isinstance(part, np.generic) else part  # the same number has the same digest
        digest.update(np.ascontiguousarray(part).data if isinstance(part, np.ndarray) else repr(part).encode())
        digest.update(b"\x00")
    return digest.hexdigest()


class IndexCache:
    """Sample indices in ``folder``; None: none are kept.

    ``least_rows``: indices with fewer documents and samples are not stored, as building them is no slower than reading.
    """

    def __init__(self, folder: Path | None, *, least_rows: int = 100_000) -> None:
        self.folder = folder
        self.least_rows = least_rows
        self._complained = False

    def get(self, build: Callable[[], SampleIndex], *, rows: int, inputs: tuple[object, ...]) -> SampleIndex:
        """What ``build`` makes from ``inputs``: read from the folder when it is there, else built and stored.

        In a folder that cannot be written to, indices are read but not stored, with a word the first time.
        """
        if self.folder is None or rows < self.least_rows:
            return build()
        name = digest_of(_FORMAT, *inputs)
        files = (self.folder / f"{name}-documents.npy", self.folder / f"{name}-samples.npy")
        index = _load(files)
        if index is not None:
            return index
        try:
            with _one_builder(self.folder):
                index = _load(files)
                if index is None:
                    index = build()
                    _store(files, index)
        except OSError as error:
            if not self._complained:
                _log.warning("indices stay in memory: the cache %s cannot be written (%s)", self.folder, error.strerror)
            self._complained = True
        return index or build()


@contextmanager
def _one_builder(folder: Path) -> Iterator[None]:
    """Wait while another process builds. Without locks (some network file systems) several build the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _load(files: tuple[Path, Path]) -> SampleIndex | None:
    """Stored index, mapped into memory; None when it is missing or damaged."""
    try:
        documents, samples = (np.load(path, mmap_mode="r").view(np.ndarray) for path in files)
    except (OSError, ValueError, EOFError):
        return None
    return SampleIndex(documents, samples)


def _store(files: tuple[Path, Path], index: SampleIndex) -> None:
    for path, table in zip(files, (index.documents, index.samples)):
        with replaced_file(path) as aside, aside.open("wb") as file:
            np.save(file, table)
