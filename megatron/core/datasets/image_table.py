"""Which images stand in the documents of token files, and where: ``PREFIX_images.json`` and ``PREFIX_images.table``.

Beside ``PREFIX.bin`` there is for each image the file that holds it, its size in pixels and bytes, a checksum of these,
and for each of its tiles the place of its first feature in the document. So a sample's images are found in constant
time, and a file that has changed since is noticed.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.core.files.durable import replaced_file, write_errors
from megatron.core.images.files import ImageFiles, ImageFolder, TarImages
from megatron.errors import DataError
from megatron.small_files import has_file, read_json

FORMAT = 1
ROW = np.dtype(
    [
        *(("offset", "<i8"), ("bytes", "<i8"), ("name", "<i8"), ("first_tile", "<i8"), ("crc32", "<u4")),
        *(("source", "<i4"), ("width", "<i4"), ("height", "<i4")),
    ]
)
"""An image. ``offset``, ``bytes``: where it is in its source; ``name``: where its name ends among the names, which lie
end to end; ``first_tile``: its first tile among the places. ``width``, ``height``: of the upright picture."""
_PARTS: dict[str, np.dtype[Any]] = {
    "starts": np.dtype("<i8"),
    "rows": ROW,
    "places": np.dtype("<i4"),
    "names": np.dtype("u1"),
}
"""Arrays of the table: each document's first image, images, places of tiles, and names."""
_KINDS: dict[str, Callable[[str], ImageFiles]] = {"folder": ImageFolder, "tar": TarImages}


@dataclass(frozen=True)
class StoredImage:
    """An image's file: the ``source``, its name and place there, its checksum, and the size of the upright picture."""

    source: int
    name: str
    offset: int
    bytes: int
    crc32: int
    width: int
    height: int


@dataclass
class ImageTableWriter:
    """Collects the images of documents in order. ``settings``: what tiles were made for. ``sources``: of the images,
    each ``{"kind": "folder" or "tar", "path": ...}``.
    """

    prefix: str
    settings: Mapping[str, Any]
    sources: list[dict[str, str]] = field(default_factory=list)
    _rows: list[tuple[int, ...]] = field(default_factory=list)
    _names: list[bytes] = field(default_factory=list)
    _starts: list[int] = field(default_factory=lambda: [0])
    _places: list[int] = field(default_factory=list)
    _end: int = 0

    @property
    def num_images(self) -> int:
        """Number of images so far."""
        return len(self._rows)

    def add_document(self, images: Sequence[tuple[StoredImage, Sequence[int]]]) -> None:
        """Append a document's images, each with the places of its tiles."""
        for image, places in images:
            name = image.name.encode("utf-8", "surrogateescape")
            self._end += len(name)
            self._names.append(name)
            of_file = (image.offset, image.bytes, self._end, len(self._places), image.crc32)
            self._rows.append((*of_file, image.source, image.width, image.height))
            self._places += places
        self._starts.append(len(self._rows))

    def write(self, *, num_tokens: int, tokens_sha256: str) -> None:
        """Write both files, for documents whose ``PREFIX.bin`` has this digest."""
        header_path, table_path = paths_of(self.prefix)
        parts = {
            "starts": np.array(self._starts, _PARTS["starts"]),
            "rows": np.array(self._rows, ROW),
            "places": np.array(self._places, _PARTS["places"]),
            "names": np.frombuffer(b"".join(self._names), np.uint8),
        }
        digest = hashlib.sha256()
        with write_errors(table_path), replaced_file(table_path) as aside, aside.open("wb") as file:
            for part in parts.values():
                digest.update(part.tobytes())
                file.write(part.tobytes())
        header = {
            "format": FORMAT,
            "num_tokens": num_tokens,
            "tokens_sha256": tokens_sha256,
            "num_documents": len(self._starts) - 1,
            "settings": dict(self.settings),
            "sources": self.sources,
            "sizes": {name: len(part) for name, part in parts.items()},
            "sha256": digest.hexdigest(),
        }
        with write_errors(header_path), replaced_file(header_path) as aside:
            aside.write_text(json.dumps(header, indent=1) + "\n", encoding="utf-8")


def paths_of(prefix: str) -> tuple[Path, Path]:
    """The header and the table beside the token files of ``prefix``."""
    return Path(f"{prefix}_images.json"), Path(f"{prefix}_images.table")


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


class ImageTable:
    """The images of the documents of ``prefix``; raises DataError for files that are missing or damaged, or belong to
    other documents than ``num_documents`` of ``num_tokens``, whose digest is ``tokens_sha256`` if it is known.
    """

    def __init__(self, prefix: str, *, num_documents: int, num_tokens: int, tokens_sha256: str | None = None) -> None:
        self.prefix = prefix
        header, table = paths_of(prefix)
        for path in (header, table):
            if not has_file(path, error=DataError):
                raise DataError(f"{path} is missing: it says which images {prefix}.bin holds places of; copy it, too")
        found: dict[str, Any] = read_json(header, dict[str, Any], error=DataError)
        try:
            is_ours = found["format"] == FORMAT
            counts, sizes = (found["num_documents"], found["num_tokens"]), found["sizes"]
            self.settings: Mapping[str, Any] = found["settings"]
            self.digest: str = found["sha256"]
            self._sources = [(each["kind"], each["path"]) for each in found["sources"]]
            parts = [(name, dtype, int(sizes[name])) for name, dtype in _PARTS.items()]
            is_whole = sizes["starts"] == counts[0] + 1 and min(size for _, _, size in parts) >= 0
        except (KeyError, TypeError, ValueError):
            raise DataError(f"{header} is damaged: preprocess the images again") from None
        if not is_ours:
            raise DataError(f"{header} was written by another version: preprocess the images again")
        if not is_whole:
            raise DataError(f"{header} is damaged: preprocess the images again")
        other_tokens = tokens_sha256 and found.get("tokens_sha256", tokens_sha256) != tokens_sha256
        if other_tokens or counts != (num_documents, num_tokens):
            raise DataError(f"{header} belongs to other files than {prefix}.bin: preprocess the images again")
        wanted = sum(dtype.itemsize * size for _, dtype, size in parts)
        if table.stat().st_size != wanted:
            raise DataError(f"{table} has {table.stat().st_size:,} bytes instead of {wanted:,}: copy it again")
        if _digest(table) != self.digest:
            raise DataError(
                f"{table} is not the one of {header.name}, or damaged: copy both again, or preprocess the images again"
            )
        at, arrays = 0, dict[str, NDArray[Any]]()
        for name, dtype, size in parts:
            empty = np.empty(0, dtype)
            arrays[name] = np.memmap(table, dtype, "r", at, (size,)).view(np.ndarray) if size else empty
            at += dtype.itemsize * size
        self._starts, self._rows, self._places, self._names = arrays.values()
        if len(self) and int(self._rows["source"].max()) >= len(self._sources):
            raise DataError(f'{header} has too few "sources": copy it again, and change only their paths')

    def __len__(self) -> int:
        return len(self._rows)

    def of_document(self, document: int) -> range:
        """Numbers of a document's images."""
        return range(self._starts.item(document), self._starts.item(document + 1))

    def places(self, image: int) -> NDArray[np.int32]:
        """The place of the first feature of each tile of an image, in its document."""
        start = self._rows["first_tile"].item(image)
        stop = self._rows["first_tile"].item(image + 1) if image + 1 < len(self) else len(self._places)
        return self._places[start:stop]

    @cached_property
    def last_places(self) -> NDArray[np.int64]:
        """For each document the place of its last tile's first feature, -1 without images, int64 [documents]."""
        tiles = np.append(self._rows["first_tile"], len(self._places))[self._starts]
        found = np.full(len(self._starts) - 1, -1, np.int64)
        has_images = tiles[1:] > tiles[:-1]
        found[has_images] = self._places[tiles[1:][has_images] - 1]
        return found

    @cached_property
    def last_sizes(self) -> NDArray[np.int64]:
        """Width and height of each document's last image, zeros without one, int64 [documents, 2]."""
        found = np.zeros((len(self._starts) - 1, 2), np.int64)
        has_images = self._starts[1:] > self._starts[:-1]
        rows = self._rows[self._starts[1:][has_images] - 1]
        found[has_images] = np.stack((rows["width"], rows["height"]), axis=1)
        return found

    def stored(self, image: int) -> StoredImage:
        """An image's file."""
        row = self._rows[image]
        before = self._rows["name"].item(image - 1) if image else 0
        name = bytes(self._names[before : int(row["name"])]).decode("utf-8", "surrogateescape")
        numbers = {each: int(row[each]) for each in ("source", "offset", "bytes", "crc32", "width", "height")}
        return StoredImage(name=name, **numbers)

    def named(self, image: StoredImage) -> str:
        """An image's name for messages."""
        return f"{self._path(image.source)}{os.sep}{image.name}"

    def read(self, image: StoredImage) -> bytes:
        """All bytes of an image; raises DataError where they aren't those that were checked."""
        try:
            content = self._files[image.source].read(image.name, image.offset, image.bytes)
            if zlib.crc32(content) != image.crc32:
                raise DataError("has changed since it was preprocessed: restore it, or preprocess the images again")
        except DataError as error:
            raise DataError(f"{self.named(image)} {error}") from None
        return content

    def _path(self, source: int) -> str:
        """Path of a source as this process sees it."""
        return str(Path(self.prefix).parent / self._sources[source][1])

    @cached_property
    def _files(self) -> list[ImageFiles]:
        try:
            return [_KINDS[kind](self._path(source)) for source, (kind, _) in enumerate(self._sources)]
        except (KeyError, DataError) as error:
            raise DataError(
                f'{error}; "sources" of {paths_of(self.prefix)[0]} say where images are, and may be changed'
            ) from None
