"""A file in object storage as a stream: read in blocks by range, each next one while the last is being used."""

from __future__ import annotations

import errno
import io
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from typing_extensions import override

from megatron.core.files.remote_path import RemotePath

if TYPE_CHECKING:
    from typing_extensions import Buffer

BLOCK = 8 << 20


class RangeReader(io.RawIOBase):
    """Bytes of ``place``, which has ``size`` of them, in at most two blocks of memory.

    ``stop``: byte up to which will be read; nothing after it is fetched ahead. Raises OSError that names the URL.
    """

    def __init__(self, place: RemotePath, size: int, *, stop: int | None = None) -> None:
        super().__init__()
        self._place, self._size, self._stop, self._at = place, size, size if stop is None else stop, 0
        self._start, self._content = 0, b""
        self._pool = ThreadPoolExecutor(1)
        self._ahead: tuple[int, Future[bytes]] | None = None

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    @override
    def tell(self) -> int:
        return self._at

    @override
    def readinto(self, buffer: Buffer, /) -> int:
        if self._at >= self._size:
            return 0
        if not self._start <= self._at < self._start + len(self._content):
            self._content, self._start = self._block(self._at), self._at
        view, begin = memoryview(buffer).cast("B"), self._at - self._start
        part = self._content[begin : begin + len(view)]
        view[: len(part)] = part
        self._at += len(part)
        return len(part)

    def _block(self, start: int) -> bytes:
        ahead, self._ahead = self._ahead, None
        content = ahead[1].result() if ahead is not None and ahead[0] == start else self._fetch(start)
        after = start + len(content)
        if start == self._start + len(self._content) and after < self._stop:  # read in order, so what follows is next
            self._ahead = after, self._pool.submit(self._fetch, after)
        return content

    def _fetch(self, start: int) -> bytes:
        stop = min(start + BLOCK, self._size if start >= self._stop else self._stop)
        content = self._place.read_range(start, stop)
        if len(content) != stop - start:
            found = f"it ends at byte {start + len(content)} of {self._size}: it is being replaced"
            raise OSError(errno.EIO, found, str(self._place))
        return content

    @override
    def close(self) -> None:
        if not self.closed:
            self._pool.shutdown(wait=True, cancel_futures=True)
            super().close()
