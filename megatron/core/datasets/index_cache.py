"""Built indices on disk, so that the ranks of a machine share one copy and the next run starts immediately.

A file's name is a digest of everything that its content depends on, so a cache cannot be stale: paths, run length and
batch size are not part of it, and equal names mean equal bytes. The last four bytes of a file are a checksum of its
name and all bytes before them; a file that doesn't match is built again.
"""

from __future__ import annotations

import hashlib
import logging
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.index_build import SampleIndex
from megatron.core.files.durable import replaced_file
from megatron.core.files.locks import lock

_FORMAT = 2  # part of every name: increase it when an index of the same inputs changes
_CHECKSUM = np.dtype("<u4")
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
    """Sample indices in ``folder``; None: indices are not stored.

    ``least_rows``: indices with fewer documents and samples are not stored, as building them is no slower than reading.
    """

    def __init__(self, folder: Path | None, *, least_rows: int = 100_000) -> None:
        self.folder = folder
        self.least_rows = least_rows
        self._complained = False
        self._damaged: set[Path] = set()

    def get(self, build: Callable[[], SampleIndex], *, rows: int, inputs: tuple[object, ...]) -> SampleIndex:
        """The index that ``build`` makes from ``inputs``: read from the folder if it is there, else built and stored.

        In a folder that cannot be written to, indices are read but not stored, with one warning. A damaged file is
        built again, with a warning.
        """
        if self.folder is None or rows < self.least_rows:
            return build()
        name = digest_of(_FORMAT, *inputs)
        files = (self.folder / f"{name}-documents.npy", self.folder / f"{name}-samples.npy")
        index = self._load(files)
        if index is not None:
            return index
        try:
            with _one_builder(self.folder):
                index = self._load(files)
                if index is None:
                    index = build()
                    _store(files, index)
        except OSError as error:
            if not self._complained:
                _log.warning(
                    "keeping indices in memory: the cache %s cannot be written (%s)", self.folder, error.strerror
                )
            self._complained = True
        return index or build()

    def _load(self, files: tuple[Path, Path]) -> SampleIndex | None:
        """Stored index; None when it is missing or damaged."""
        tables = list[NDArray[Any]]()
        for path in files:
            try:
                content = np.memmap(path, np.uint8, mode="r")
                if content[-_CHECKSUM.itemsize :].tobytes() != _checksum(path, content[: -_CHECKSUM.itemsize]):
                    raise ValueError("the checksum is another")
                tables.append(np.load(path, mmap_mode="r").view(np.ndarray))
            except OSError:
                return None
            except (ValueError, EOFError):
                if path not in self._damaged:
                    _log.warning("the index cache %s is damaged: building it again", path)
                self._damaged.add(path)
                return None
        return SampleIndex(*tables)


@contextmanager
def _one_builder(folder: Path) -> Iterator[None]:
    """Wait while another process builds, then delete the unfinished files of killed ones.

    Without locks (on some network file systems) several processes build the same bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        if lock(file, wait=True) == "locked":
            for left in folder.glob(".*.npy.*"):
                left.unlink(missing_ok=True)
        yield


def _checksum(path: Path, content: NDArray[np.uint8]) -> bytes:
    return _CHECKSUM.type(zlib.crc32(content.data, zlib.crc32(path.name.encode()))).tobytes()


def _store(files: tuple[Path, Path], index: SampleIndex) -> None:
    for path, array in zip(files, (index.documents, index.samples)):
        table = np.ascontiguousarray(array)
        with replaced_file(path) as aside:
            with aside.open("wb") as file:
                # Not np.save, whose error for a full disk gives no reason.
                np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(table))
                file.write(table.data)
            checksum = _checksum(path, np.memmap(aside, np.uint8, mode="r"))
            with aside.open("ab") as file:
                file.write(checksum)
