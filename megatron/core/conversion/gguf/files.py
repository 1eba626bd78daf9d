"""GGUF files as they lie on a disk: their keys, and where each tensor is. Sizes are checked before anything is read.

Format: ``GGUF``, version, numbers of tensors and keys; the keys, each with its type and value; for each tensor its
name, sizes (innermost first), type and place; the tensors' bytes, aligned.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.core.checkpointing.manifest import listed
from megatron.core.conversion.gguf.number_types import library
from megatron.core.conversion.portable import LazyTensor
from megatron.errors import CheckpointError
from megatron.small_files import check_regular, shown

_NUMBERS = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_TEXT, _ARRAY = 8, 9
_MOST_DIMS = 4
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class _Place:
    """Where a tensor is: its file, first byte, shape and the package's type."""

    path: Path
    start: int
    shape: tuple[int, ...]
    kind: Any


class _Cursor:
    """Reads a file from front to back; ValueError where it ends too early."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self.at = data, 0

    def take(self, size: int) -> bytes:
        """The next bytes."""
        if size > len(self._data) - self.at:
            raise ValueError(f"it ends at byte {len(self._data):,}, within its header")
        self.at += size
        return self._data[self.at - size : self.at]

    def number(self, kind: str) -> int:
        """The next whole number."""
        found: int = struct.unpack(kind, self.take(struct.calcsize(kind)))[0]
        return found

    def text(self) -> str:
        """The next text."""
        return str(self.take(self.number("<Q")), "utf-8", "replace")

    def value(self, kind: int) -> Any:
        """The next value, of a type; a number of 32 bits as the shortest that is stored so."""
        if kind == _TEXT:
            return self.text()
        if kind == _ARRAY:
            inner, count = self.number("<I"), self.number("<Q")
            if inner == _TEXT:
                return [self.text() for _ in range(count)]
            return _shortest(np.frombuffer(self.take(count * _dtype(inner).itemsize), _dtype(inner)))
        return _shortest(np.frombuffer(self.take(_dtype(kind).itemsize), _dtype(kind)))[0]


def _dtype(kind: int) -> np.dtype[Any]:
    if kind not in _NUMBERS:
        raise ValueError(f"a value has the unknown type {kind}")
    return np.dtype(_NUMBERS[kind])


def _shortest(numbers: np.ndarray[Any, Any]) -> list[Any]:
    return [float(str(each)) for each in numbers] if numbers.dtype == np.float32 else numbers.tolist()


@dataclass(frozen=True)
class GgufFile:
    """The keys and tensors of a model's files."""

    keys: Mapping[str, Any]
    tensors: Mapping[str, LazyTensor]
    kinds: tuple[str, ...]


def open_gguf(place: Path) -> GgufFile:
    """The model in a file, or in a folder with one; of its tensors only places are read now.

    CheckpointError for files that are damaged, lack parts, or hold types of numbers that aren't read.
    """
    paths = _parts(place)
    keys: dict[str, Any] = {}
    places: dict[str, _Place] = {}
    for path in paths:
        found, here = _header(path)
        keys = keys or found
        places |= here
    quantized = any(each.kind.name not in _PLAIN for each in places.values())
    tensors = {name: _lazy(each, whole=quantized) for name, each in places.items()}
    return GgufFile(keys, tensors, tuple(sorted({each.kind.name for each in places.values()})))


def _parts(place: Path) -> list[Path]:
    """The files of a model, in their order."""
    if not place.exists():
        raise CheckpointError(f"--load {place} does not exist: give a .gguf file, or a folder with one")
    if not place.is_dir():
        paths = [place]
    else:
        paths = sorted(place.glob("*.gguf"))
        models = {match[1] if (match := _PART.fullmatch(path.name)) else path.name for path in paths}
        if len(models) != 1:
            found = (
                f"{len(models)} models, {listed(sorted(models))}: name one of the files" if models else "no .gguf file"
            )
            raise CheckpointError(f"--load {place} holds {found}")
    if match := _PART.fullmatch(paths[0].name):
        count = int(match[3])
        paths = [paths[0].with_name(f"{match[1]}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]
    if missing := [path.name for path in paths if not path.is_file()]:
        raise CheckpointError(f"{paths[0].parent} lacks {listed(missing)}: download all parts of the model")
    return paths


def _header(path: Path) -> tuple[dict[str, Any], dict[str, _Place]]:
    check_regular(path, where=str(path), error=CheckpointError)
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read_header(path, _Cursor(data), len(data))
    except (ValueError, OverflowError, MemoryError, struct.error) as error:
        raise CheckpointError(f"{path} is no whole GGUF file: {error}") from None


def _read_header(path: Path, cursor: _Cursor, size: int) -> tuple[dict[str, Any], dict[str, _Place]]:
    gguf = library()
    if cursor.take(4) != b"GGUF":
        raise ValueError("it doesn't begin with GGUF")
    version = cursor.number("<I")
    if version not in (2, 3):
        raise ValueError(f"its version is {version}, and 2 and 3 of little-endian files are read")
    num_tensors, num_keys = cursor.number("<Q"), cursor.number("<Q")
    keys: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.text()
        keys[key] = cursor.value(cursor.number("<I"))
    listing = []
    for _ in range(num_tensors):
        name, dims = cursor.text(), cursor.number("<I")
        if dims > _MOST_DIMS:
            raise ValueError(f"{shown(name)} has {dims} dimensions")
        shape = tuple(cursor.number("<Q") for _ in range(dims))[::-1]
        listing.append((name, shape, cursor.number("<I"), cursor.number("<Q")))
    alignment = keys.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1:
        raise ValueError(f"general.alignment is {shown(alignment)}; expected a number of bytes")
    first = -(-cursor.at // alignment) * alignment
    places: dict[str, _Place] = {}
    for name, shape, kind, offset in listing:
        try:
            typed = gguf.GGMLQuantizationType(kind)
            gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[typed][1]), np.uint8), typed)
        except (ValueError, NotImplementedError):
            raise ValueError(f"{shown(name)} has numbers of the type {kind}, which gguf doesn't read") from None
        place = _Place(path, first + offset, shape, typed)
        if shape and shape[-1] % gguf.GGML_QUANT_SIZES[typed][0]:
            raise ValueError(f"{shown(name)} has rows of {shape[-1]}, which the blocks of {typed.name} don't divide")
        if place.start + _nbytes(place) > size:
            raise ValueError(f"{shown(name)} lies beyond its end: download it again")
        if name in places:
            raise ValueError(f"{shown(name)} is there twice")
        places[name] = place
    return keys, places


def _nbytes(place: _Place) -> int:
    sizes: tuple[int, int] = library().GGML_QUANT_SIZES[place.kind]
    return math.prod(place.shape) // sizes[0] * sizes[1]


def _lazy(place: _Place, *, whole: bool) -> LazyTensor:
    dtype = torch.float32 if whole else _PLAIN[place.kind.name]
    return LazyTensor(place.shape, dtype, partial(_read, place, dtype))


def _read(place: _Place, dtype: torch.dtype) -> Tensor:
    """The tensor's numbers; those of few bits as the gguf package says what they stand for."""
    with place.path.open("rb") as file:
        file.seek(place.start)
        raw = bytearray(file.read(_nbytes(place)))
    if len(raw) != _nbytes(place):
        raise CheckpointError(f"{place.path} became shorter while it was read")
    if place.kind.name in _PLAIN:
        plain = torch.frombuffer(raw, dtype=_PLAIN[place.kind.name]) if raw else torch.empty(0, dtype=dtype)
        return plain.to(dtype).view(place.shape)
    gguf = library()
    rows = np.frombuffer(raw, np.uint8).reshape(gguf.quant_shape_to_byte_shape(place.shape, place.kind))
    return torch.from_numpy(gguf.quants.dequantize(rows, place.kind)).view(place.shape)
