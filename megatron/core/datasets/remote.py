"""Data sets in object storage: the index is copied, tokens are fetched in blocks as they are read, and kept on disk.

The local ``.bin`` is a sparse file of full size, which is read like any other; the file ``.crc32`` beside it has a
checksum of each block that was fetched, and 0 for others. Each process compares a block with it before its first use.
Processes of a machine share both files: a block fetched twice is the same bytes.
"""

from __future__ import annotations

import hashlib
import logging
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from megatron.core.datasets.indexed_format import bin_path
from megatron.core.files.durable import replaced_file, write_errors
from megatron.core.files.remote_path import RemotePath
from megatron.errors import RESTART_MAY_HELP, DataError, exit_code_of

BLOCK = 4 << 20
_logger = logging.getLogger(__name__)


class RemoteTokens:
    """A data set at the URL ``prefix``, fetched on demand into files in ``cache``; ``local_prefix``: their prefix.

    Data that are replaced at the same URL get other files. Raises ConfigError when the library of the kind of storage
    is missing, DataError when there are no data, or they can't be fetched.
    """

    def __init__(self, prefix: str, cache: Path) -> None:
        self._tokens, index = RemotePath(f"{prefix}.bin"), RemotePath(f"{prefix}.idx")
        with _fetching(index):
            version = hashlib.sha256(f"{prefix} {index.version()} {self._tokens.version()}".encode())
            self.local_prefix = str(cache / f"{Path(prefix).name}-{version.hexdigest()[:16]}")
            size = self._tokens.stat().st_size
            with write_errors(bin_path(self.local_prefix), remedy="give another --data-cache-path"):
                cache.mkdir(parents=True, exist_ok=True)
                for ending in (".idx", ".meta.json"):
                    remote, local = RemotePath(prefix + ending), Path(self.local_prefix + ending)
                    if not local.exists() and (ending == ".idx" or remote.exists()):
                        with replaced_file(local) as aside:
                            remote.copy_to(aside)
                for ending, length in ((".bin", size), (".crc32", -(-size // BLOCK) * 4)):
                    with Path(self.local_prefix + ending).open("ab") as file:
                        if file.tell() != length:
                            file.truncate(length)  # zeros, which take no space yet
        self._size = size
        self._checksums = np.memmap(f"{self.local_prefix}.crc32", "<u4", mode="r+") if size else np.zeros(0, "<u4")
        self._checked = set[int]()

    def ensure(self, start: int, stop: int) -> None:
        """Fetch bytes ``[start, stop)`` of the tokens into the local file, unless they are there."""
        for block in range(start // BLOCK, -(-stop // BLOCK)):
            if block not in self._checked:
                if not self._is_whole(block):
                    self._fetch(block)
                self._checked.add(block)

    def _is_whole(self, block: int) -> bool:
        """Whether the block is on disk and undamaged."""
        if not self._checksums[block]:
            return False
        with bin_path(self.local_prefix).open("rb") as file:
            file.seek(block * BLOCK)
            if _checksum(file.read(BLOCK)) == self._checksums[block]:
                return True
        _logger.warning("%s: block %d is damaged, fetched again", bin_path(self.local_prefix), block)
        return False

    def _fetch(self, block: int) -> None:
        start, stop = block * BLOCK, min((block + 1) * BLOCK, self._size)
        with _fetching(self._tokens):
            content = self._tokens.read_range(start, stop)
        if len(content) != stop - start:
            raise DataError(
                f"{self._tokens} ends at byte {start + len(content)} of {self._size}: it is being replaced",
                exit_code=RESTART_MAY_HELP,
            )
        path = bin_path(self.local_prefix)
        with write_errors(path, remedy="give another --data-cache-path"), path.open("rb+") as file:
            file.seek(start)
            file.write(content)
        self._checksums[block] = _checksum(content)


def _checksum(content: bytes) -> int:
    """CRC-32, never 0."""
    return zlib.crc32(content) or 1


@contextmanager
def _fetching(place: RemotePath) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise DataError(
            f"{place} or its .bin does not exist: a data path is the prefix of both files, without their endings"
        ) from None
    except OSError as error:
        raise DataError(f"{place} cannot be fetched: {error.strerror}", exit_code=exit_code_of(error)) from error
