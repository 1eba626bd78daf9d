"""Where images lie: files of a folder, by name, and members of tar files, by offset."""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megatron.core.images.decoding import MOST_BYTES
from megatron.errors import DataError

DATA_URL = re.compile(r"data:image/[\w.+-]{1,64};base64,", re.IGNORECASE)
"""The beginning of a data URL of an image."""
ENDINGS = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
"""Endings of members of tar files that are images."""


class ImageFiles(Protocol):
    """A folder or a tar file."""

    path: str

    def read(self, name: str, offset: int, size: int) -> bytes:
        """All bytes of an image. Raises DataError whose sentence goes on after its name."""


class ImageFolder:
    """Images below a folder. Names that lead out of it are refused, also by way of symbolic links."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._root = os.path.realpath(path)
        if not os.path.isdir(self._root):
            raise DataError(f"the image folder {path} does not exist or is no folder: name it with --image-folder")

    def read(self, name: str, offset: int = 0, size: int = -1) -> bytes:
        """The file ``name`` of the folder; with ``size`` one of as many bytes."""
        if name.startswith("data:"):
            raise DataError("is a data URL; images are read from files: store its bytes in one")
        if "://" in name:
            raise DataError("is a URL; images are read from files: fetch it")
        try:
            os.fsencode(name)
        except UnicodeEncodeError:  # half a pair of UTF-16, as JSON may have
            name = ""
        if not name or "\0" in name:
            raise DataError("is no name of a file")
        real = os.path.realpath(os.path.join(self._root, name))
        if os.path.commonpath([real, self._root]) != self._root:
            raise DataError(f"leads out of the folder of images {self.path}: copy it in there")
        return read_image(real, size=size)


def read_image(path: str, *, size: int = -1) -> bytes:
    """All bytes of an image's file, which is no link; with ``size`` one of as many bytes. Raises DataError."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)  # a pipe would wait
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}") from None
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise DataError("is no file")
        return _whole(file, 0, found.st_size if size < 0 else size, found.st_size)
    finally:
        os.close(file)


def from_data_url(url: str) -> bytes:
    """The bytes in a data URL, ``data:image/png;base64,...``. Raises DataError."""
    begun = DATA_URL.match(url)
    if begun is None:
        raise DataError("is a data URL of another form than data:image/png;base64, and the file's bytes in base64")
    try:
        return base64.b64decode(url[begun.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise DataError("is a data URL that is no base64") from None


class TarImages:
    """Images in an uncompressed tar file, which stays open."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise DataError(f"{path}, which holds images, cannot be read: {error.strerror}") from None

    def read(self, name: str, offset: int, size: int) -> bytes:
        """The bytes of the member at ``offset``."""
        return _whole(self._file, offset, size, os.fstat(self._file).st_size - offset)

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)


def _whole(file: int, offset: int, size: int, available: int) -> bytes:
    """``size`` bytes of an open file, of which there are ``available``."""
    if size > MOST_BYTES:
        raise DataError(f"has {size:,} bytes, and at most {MOST_BYTES:,} are read: make it smaller")
    if size > available:
        raise DataError(f"had {size:,} bytes and has {max(available, 0):,}: the file was cut short; copy it again")
    try:
        content = os.pread(file, size, offset)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}") from None
    if len(content) < size:
        raise DataError(f"had {size:,} bytes and has {len(content):,}: the file was cut short; copy it again")
    return content


@dataclass(frozen=True)
class Member:
    """A file in a tar file: its name, and where its bytes are. ``key``, ``ending``: the name up to the first dot of its
    last part, which files of one sample share, and the rest.
    """

    name: str
    offset: int
    size: int

    @property
    def key(self) -> str:
        """The name up to the first dot of its last part."""
        folder, _, last = self.name.rpartition("/")
        return f"{folder}/{last.partition('.')[0]}" if folder else last.partition(".")[0]

    @property
    def ending(self) -> str:
        """What follows the key, in small letters."""
        return self.name[len(self.key) :].lower()


def tar_samples(path: str) -> Iterator[list[Member]]:
    """Members of a tar file in webdataset's layout, sample by sample: those that share a key follow each other.

    Nothing is unpacked. Raises DataError for a file that is none, is compressed or damaged.
    """
    try:
        with tarfile.open(path, "r:") as archive:
            group = list[Member]()
            while (found := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # tarfile would keep all that it has seen
                if found.isdir():
                    continue
                if not found.isreg() or found.issparse():
                    raise DataError(f"{path}: the member {found.name} is a link or no file; pack the files themselves")
                member = Member(found.name, found.offset_data, found.size)
                if group and member.key != group[0].key:
                    yield group
                    group = []
                group.append(member)
            if group:
                yield group
    except tarfile.TarError as error:
        hint = "unpack its compression first" if Path(path).suffix != ".tar" else "copy it again"
        raise DataError(f"{path} is no tar file that can be read at offsets: {error}; {hint}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
