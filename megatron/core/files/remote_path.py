"""A place in object storage, used like a ``pathlib.Path``; fsspec knows how to reach it.

Object stores have keys, no folders and no renames; the only guarantee is that a put is seen whole or not at all.
Whatever a storage library raises becomes an OSError that names the URL, as for a disk.
"""

from __future__ import annotations

import errno
import io
import logging
import re
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from megatron.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Buffer

# Here folders are only beginnings of names, and making one would make its bucket where that doesn't exist.
_BUCKET_STORES = frozenset(("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"))
_PART_BYTES, _MOST_PARTS = 32 << 20, 9000  # of an upload; S3 takes 10,000 parts
# What listings say of a version, the most exact first.
_VERSIONS = ("ETag", "etag", "generation", "last_modified", "LastModified", "mtime", "created")
# Messages of the client libraries where credentials are missing, wrong or too weak and they raise no PermissionError.
_REFUSALS = (
    *("Unable to locate credentials", "Partial credentials found"),  # S3
    *("Forbidden:", "Invalid Credentials", "Anonymous caller"),  # Google Cloud Storage
    *("AuthenticationFailed", "AuthorizationFailure", "AuthorizationPermissionMismatch"),  # Azure
)


def is_url(place: str) -> bool:
    """Whether ``place`` is a URL that fsspec opens, as ``s3://bucket/folder``."""
    return "://" in place


def path_of(place: str | Path | RemotePath) -> AnyPath:
    """The path that a flag names: of this machine's file systems, also as ``file://``, or in object storage."""
    if isinstance(place, (Path, RemotePath)):
        return place
    if place.startswith("file://"):
        return Path(place.removeprefix("file://"))
    return RemotePath(place if place.endswith("://") else place.rstrip("/")) if is_url(place) else Path(place)


@dataclass(frozen=True)
class RemoteStat:
    """A file's size in bytes."""

    st_size: int


@dataclass(frozen=True, order=True)
class RemoteFile:
    """A file of a listing: its place, its size in bytes, and a text that changes when it is replaced."""

    url: str
    size: int
    version: str


def _remote_file(base: str, start: str, entry: dict[str, Any]) -> RemoteFile:
    """An entry of a listing of ``base``, which is ``start`` in the storage's own words."""
    below = str(entry["name"]).strip("/").removeprefix(start.strip("/")).strip("/")
    version = next((str(entry[key]) for key in _VERSIONS if entry.get(key)), str(entry["size"]))
    return RemoteFile(f"{base.rstrip('/')}/{below}" if below else base, int(entry["size"]), version)


@dataclass(frozen=True, order=True)
class RemotePath:
    """The place ``url``. Its methods do what those of ``pathlib.Path`` do, as far as checkpoints and data need them.

    They raise ConfigError where the library of the kind of storage is missing, and OSError for everything else.
    """

    url: str

    @override
    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url}{'' if self.url.endswith('://') else '/'}{name}")

    @property
    def name(self) -> str:
        """The last part."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """The place without its last part."""
        return RemotePath(self.url.rpartition("/")[0])

    def exists(self) -> bool:
        """Whether a file or folder is there now."""
        with self._reached() as (files, path):
            return bool(files.exists(path))

    def is_dir(self) -> bool:
        """Whether anything is below it."""
        with self._reached() as (files, path):
            return bool(files.isdir(path))

    def is_file(self) -> bool:
        """Whether it is a file."""
        with self._reached() as (files, path):
            return bool(files.isfile(path))

    def iterdir(self) -> Iterator[RemotePath]:
        """What is directly below it; nothing where nothing was put, since a folder is only a beginning of names."""
        entries = [str(entry["name"]).rstrip("/") for entry in self._list()]
        return iter([self / entry.rpartition("/")[2] for entry in entries])

    def glob(self, pattern: str) -> Iterator[RemotePath]:
        """What is below it and fits ``pattern``."""
        with self._reached() as (files, path):
            entries = [str(entry) for entry in files.glob(f"{path.rstrip('/')}/{pattern}")]
        depth = pattern.count("/") + 1
        return iter([self / "/".join(entry.rstrip("/").split("/")[-depth:]) for entry in entries])

    def files_below(self) -> list[RemoteFile]:
        """All files below it, at any depth, or itself if it is a file, by listing."""
        with self._reached() as (files, path):
            found: dict[str, dict[str, Any]] = files.find(path, detail=True)
            return [_remote_file(self.url, path, entry) for entry in found.values()]

    def files_matching(self) -> list[RemoteFile]:
        """The files that fit this URL, which is a glob."""
        base = re.split(r"[*?\[]", self.url, maxsplit=1)[0].rpartition("/")[0]
        with self._reached() as (files, path):
            start = str(files._strip_protocol(base))
            found: dict[str, dict[str, Any]] = files.glob(path, detail=True)
            return [_remote_file(base, start, each) for each in found.values() if each["type"] == "file"]

    def stat(self) -> RemoteStat:
        """Size of the file."""
        with self._reached() as (files, path):
            return RemoteStat(int(files.info(path)["size"]))

    def sizes_below(self) -> dict[str, int]:
        """Sizes of the files directly below it, by name, for one listing in place of a request for each."""
        found = [entry for entry in self._list() if entry["type"] == "file"]
        return {str(entry["name"]).rpartition("/")[2]: int(entry["size"]) for entry in found}

    def _list(self) -> list[dict[str, Any]]:
        try:
            with self._reached() as (files, path):
                entries: list[dict[str, Any]] = files.ls(path, detail=True)
        except FileNotFoundError:
            return []
        return [entry for entry in entries if str(entry["name"]).strip("/") != path.strip("/")]

    def version(self) -> str:
        """A text that changes when the file is replaced."""
        with self._reached() as (files, path):
            return str(files.ukey(path))

    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:
        """Make the folder and those above it, where the storage has such a thing; never a bucket."""
        if self.url.partition("://")[0] not in _BUCKET_STORES:
            with self._reached() as (files, path):
                files.makedirs(path, exist_ok=True)

    def open(self, mode: str, *, buffering: int = -1) -> io.RawIOBase | io.BufferedReader:
        """The file, open to be read (``rb``) or written (``wb``); what is written is there once it is closed."""
        with self._reached(writing=mode == "wb") as (files, path):
            file = RemoteStream(files.open(path, mode), self)
        return io.BufferedReader(file) if mode == "rb" and buffering else file

    def upload(self, size: int) -> RemoteStream:
        """A stream for new content of about ``size`` bytes, sent in parts; it is there once the stream is closed.

        A process that is killed leaves parts that no listing shows, until rules of the bucket delete them.
        """
        part = max(_PART_BYTES, size // _MOST_PARTS)
        with self._reached(writing=True) as (files, path):
            return RemoteStream(files.open(path, "wb", block_size=part), self)

    def read_bytes(self) -> bytes:
        """All of the file."""
        return self.read_range(None, None)

    def read_range(self, start: int | None, stop: int | None) -> bytes:
        """Bytes ``[start, stop)`` of the file; fewer where it ends before."""
        with self._reached() as (files, path):
            return bytes(files.cat_file(path, start=start, end=stop))

    def read_text(self, *, encoding: str) -> str:
        """All of the file as text."""
        return self.read_bytes().decode(encoding)

    def write_text(self, text: str, *, encoding: str) -> None:
        """Put the file, in place of one that is there."""
        with self._reached(writing=True) as (files, path):
            files.pipe_file(path, text.encode(encoding))

    def copy_to(self, local: Path) -> None:
        """Copy the file to a disk."""
        with self._reached() as (files, path):
            files.get_file(path, str(local))

    def copy_from(self, local: Path) -> None:
        """Put a file of a disk, in parts where it is large; it is seen whole or not at all."""
        with self._reached(writing=True) as (files, path):
            files.put_file(str(local), path)

    def unlink(self) -> None:
        """Delete the file."""
        with self._reached() as (files, path):
            files.rm_file(path)

    def remove_tree(self) -> None:
        """Delete everything below it."""
        with self._reached() as (files, path):
            files.rm(path, recursive=True)

    @contextmanager
    def _reached(self, *, writing: bool = False) -> Iterator[tuple[Any, str]]:
        """File system and path in it. Not kept: each process, forked ones too, needs connections of its own."""
        try:
            import fsspec
        except ImportError:
            raise ConfigError(f"{self.url} needs the fsspec library: pip install fsspec") from None
        try:
            files, path = fsspec.core.url_to_fs(self.url)
        except ImportError as error:
            raise ConfigError(f"{self.url} needs another library: {error}") from None
        except Exception as error:  # credentials that can't be read, options that are missing: each library has its own
            raise ConfigError(f"{self.url} can't be opened: {error}") from error
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs the traceback of each error that it raises
        files.invalidate_cache()  # other ranks write, too
        with _as_os_error(self.url, writing=writing):
            yield files, str(path)


AnyPath = Path | RemotePath


class RemoteStream(io.RawIOBase):
    """An open file of fsspec's, whose errors name the place."""

    def __init__(self, file: Any, place: RemotePath) -> None:
        super().__init__()
        self._file = file
        self.name = str(place)

    @override
    def readable(self) -> bool:
        return bool(self._file.readable())

    @override
    def writable(self) -> bool:
        return bool(self._file.writable())

    @override
    def seekable(self) -> bool:
        return bool(self._file.seekable())

    @override
    def readinto(self, buffer: Buffer, /) -> int:
        view = memoryview(buffer).cast("B")
        with _as_os_error(self.name):
            data = self._file.read(len(view))
        view[: len(data)] = data
        return len(data)

    @override
    def write(self, data: Buffer, /) -> int:
        with _as_os_error(self.name, writing=True):
            self._file.write(data)
        return memoryview(data).nbytes

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        with _as_os_error(self.name):
            return int(self._file.seek(offset, whence))

    @override
    def tell(self) -> int:
        return int(self._file.tell())

    def discard(self) -> None:
        """Close without completing what was written: the file doesn't appear, and one that is there remains."""
        with suppress(Exception):  # whatever the library says
            self._file.discard()
        with suppress(Exception):
            self._file.closed = True  # its own end would complete it
        super().close()

    @override
    def close(self) -> None:
        if not self.closed:
            try:
                with _as_os_error(self.name, writing=self.writable()):
                    self._file.close()
            finally:
                super().close()


@contextmanager
def _as_os_error(url: str, *, writing: bool = False) -> Iterator[None]:
    """Each library has its own exceptions, some with a whole answer of the service as their text."""
    try:
        yield
    except Exception as error:
        is_of_library = isinstance(error, (ssl.SSLError, socket.gaierror))  # whose numbers are no errno
        code = (error.errno if isinstance(error, OSError) and not is_of_library else None) or errno.EIO
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        is_missing, text = isinstance(error, FileNotFoundError), str(error)
        # Where nothing need be for a write, only the bucket can be missing. Azure calls it a container.
        if "bucket does not exist" in text or "ContainerNotFound" in text or (is_missing and writing):
            code, reason = errno.ENOENT, "the bucket does not exist; make it first"
        elif is_missing:
            code, reason = errno.ENOENT, "there is no such file"
        elif reason == "Bad Request":  # all that an answer without a body says
            reason = "the service says Bad Request; have the credentials expired?"
        reason = (reason.splitlines() or [type(error).__name__])[0].rstrip(".")
        if isinstance(error, PermissionError) or any(words in text for words in _REFUSALS):
            code, reason = errno.EACCES, f"{reason}; the credentials must be valid and allow this"
        raise OSError(code, reason, url) from error
