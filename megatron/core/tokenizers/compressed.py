"""Compressed files of several streams, read to their last byte.

``cat``, pbzip2, pigz, pixz and pzstd write streams end to end. The standard library's readers of bz2 and xz ignore any
bytes after a stream that don't begin another one, so with a damaged header they lose the rest without an error.
"""

from __future__ import annotations

import bz2
import io
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO

from typing_extensions import override

from megatron.errors import ConfigError, DataError

# Endings, and the first bytes of such files.
_SIGNATURES = {
    ".gz": rb"\x1f\x8b\x08",
    ".bz2": rb"BZh[1-9]1AY&SY",
    ".xz": rb"\xfd7zXZ\x00",
    ".zst": rb"\x28\xb5\x2f\xfd",
}
ENDINGS = tuple(_SIGNATURES)
_PIECE = 1 << 12  # bytes decompressed at a time; at the highest ratios they become about 100 MB


class DamagedStreamError(Exception):
    """Bytes that are not a stream of their kind, or only a part of one; the message says at which byte."""


@dataclass(frozen=True)
class _Kind:
    """How to read one stream. ``padding``: whether zeros may follow it, as on tapes."""

    name: str
    new_stream: Callable[[], Any]
    error: type[Exception]
    padding: bool = False


def decompressed(path: str, raw: io.BufferedReader) -> IO[bytes]:
    """The file's content, decompressed as its ending says; raises ConfigError when the library is missing.

    Raises DataError for a file whose compression is not that of its ending; reading raises DamagedStreamError.
    """
    ending, start = Path(path).suffix, raw.peek(16)
    packed = next((each for each, signature in _SIGNATURES.items() if re.match(signature, start)), ending)
    if packed != ending:
        raise DataError(
            f"--input {path} holds a {packed} file's bytes: let its name end in {packed}, or decompress it first"
        )
    return io.BufferedReader(_Streams(raw, _kind_of(path, ending))) if ending in ENDINGS else raw


def _kind_of(path: str, ending: str) -> _Kind:
    match ending:
        case ".gz":
            return _Kind("gzip", lambda: zlib.decompressobj(wbits=16 + zlib.MAX_WBITS), zlib.error, padding=True)
        case ".bz2":
            return _Kind("bzip2", bz2.BZ2Decompressor, OSError)
        case ".xz":
            return _Kind("xz", lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ), lzma.LZMAError, padding=True)
        case _:
            try:
                import zstandard
            except ImportError:
                raise ConfigError(
                    f"--input {path} needs the zstandard library: pip install zstandard, or decompress the file first."
                ) from None
            return _Kind("Zstandard", zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError)


class _Streams(io.RawIOBase):
    """The content of consecutive streams."""

    def __init__(self, raw: BinaryIO, kind: _Kind) -> None:
        self._contents = _contents(raw, kind)
        self._content = b""

    @override
    def readable(self) -> bool:
        """True, for ``io.BufferedReader``."""
        return True

    @override
    def readinto(self, buffer: Any) -> int:
        """Fill the buffer with the next bytes; returns their number, 0 at the end."""
        while not self._content:
            content = next(self._contents, None)
            if content is None:
                return 0
            self._content = content
        size = min(len(buffer), len(self._content))
        buffer[:size], self._content = self._content[:size], self._content[size:]
        return size


def _contents(raw: BinaryIO, kind: _Kind) -> Iterator[bytes]:
    """The content piece by piece; DamagedStreamError for bytes that are neither a stream nor padding after one."""
    stream, start, end, rest = None, 0, 0, b""
    while packed := rest or raw.read(_PIECE):
        end += 0 if rest else len(packed)
        if stream is None:
            if kind.padding and start < end - len(packed):
                packed = packed.lstrip(b"\0")
            if not packed:
                rest = b""
                continue
            stream, start = kind.new_stream(), end - len(packed)
        try:
            content: bytes = stream.decompress(packed)
        except (kind.error, EOFError) as error:
            raise DamagedStreamError(f"no valid {kind.name} stream begins at byte {start} ({error})") from None
        yield content
        rest = stream.unused_data
        stream = None if stream.eof else stream
    if stream is not None:
        raise DamagedStreamError(f"the {kind.name} stream that begins at byte {start} has no end")
    if not end:
        raise DamagedStreamError("it has 0 bytes")
