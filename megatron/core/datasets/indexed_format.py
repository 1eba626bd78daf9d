"""The bytes of ``PREFIX.idx``, as Megatron-LM defines them, and the checks of a pair of files.

All integers are little-endian. A header (magic, version, type code, number of sequences S, number of document
boundaries D) is followed by S int32 lengths in tokens, S int64 byte offsets into ``PREFIX.bin``, D int64 document
boundaries (first 0, last S), and, for multimodal files only, S int8 modes, which the header doesn't show.
``PREFIX.bin`` holds the tokens, end to end.
"""

from __future__ import annotations

import glob
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.errors import DataError
from megatron.small_files import has_file

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
LENGTH_DTYPE = np.dtype("<i4")
OFFSET_DTYPE = np.dtype("<i8")
MODE_DTYPE = np.dtype("i1")
TOKEN_DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
_OLD_MAGIC = b"TNTIDX\x00\x00"  # --data-impl lazy and cached, before 2022
_HEADER = struct.Struct("<9sQBQQ")
_BLOCK = 1 << 20  # rows checked at a time: bounded memory for any number of sequences


def bin_path(prefix: str) -> Path:
    """File of the tokens."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str) -> Path:
    """File of lengths, offsets and document boundaries."""
    return Path(f"{prefix}.idx")


def token_dtype(vocab_size: int | None) -> np.dtype[Any]:
    """Type in which Megatron-LM stores ids of this vocabulary: uint16 below 65,500 ids, else (or unknown) int32."""
    return TOKEN_DTYPES[8] if vocab_size is not None and vocab_size < 65500 else TOKEN_DTYPES[4]


@dataclass(frozen=True)
class IndexHeader:
    """Content of the first 34 bytes of ``PREFIX.idx``."""

    dtype: np.dtype[Any]
    num_sequences: int
    num_boundaries: int

    size = _HEADER.size

    def pack(self) -> bytes:
        """The 34 bytes."""
        code = next(code for code, dtype in TOKEN_DTYPES.items() if dtype == self.dtype)
        return _HEADER.pack(MAGIC, VERSION, code, self.num_sequences, self.num_boundaries)

    def file_size(self, *, multimodal: bool) -> int:
        """Bytes of the whole index file."""
        row = LENGTH_DTYPE.itemsize + OFFSET_DTYPE.itemsize + (MODE_DTYPE.itemsize if multimodal else 0)
        return self.size + row * self.num_sequences + OFFSET_DTYPE.itemsize * self.num_boundaries


def read_header(prefix: str, *, multimodal: bool) -> IndexHeader:
    """Header of ``PREFIX.idx``; DataError when a file is missing, of another format, or not of the header's size."""
    _check_files_exist(prefix)
    path = idx_path(prefix)
    with path.open("rb") as file:
        first = file.read(_HEADER.size)
    _check_magic(prefix, first)
    if len(first) < _HEADER.size:
        raise DataError(f"{path} ends after {len(first)} bytes, inside its header: copy or write it again")
    _, version, code, num_sequences, num_boundaries = _HEADER.unpack(first)
    if version != VERSION:
        raise DataError(f"{path} has format version {version}; only version {VERSION} exists: the file is damaged")
    if code not in TOKEN_DTYPES:
        raise DataError(f"{path} has token type code {code}; codes are 1 to {max(TOKEN_DTYPES)}: the file is damaged")
    header = IndexHeader(TOKEN_DTYPES[code], num_sequences, num_boundaries)
    actual, needed = path.stat().st_size, header.file_size(multimodal=multimodal)
    if actual == needed:
        return header
    if actual == header.file_size(multimodal=not multimodal):
        hint = "it holds no modes: leave --multimodal out" if multimodal else "it holds modes: a multimodal data set"
    else:
        hint = "it is truncated: copy or write it again" if actual < needed else "the file is damaged"
    raise DataError(
        f"{path} has {_difference(actual, needed)} its {num_sequences} sequences and {num_boundaries} document "
        f"boundaries take: {hint}"
    )


def check_tables(
    prefix: str,
    *,
    dtype: np.dtype[Any],
    lengths: NDArray[np.int32],
    offsets: NDArray[np.int64],
    boundaries: NDArray[np.int64],
) -> int:
    """Number of tokens, after checking that lengths, offsets, boundaries and the size of ``PREFIX.bin`` agree."""
    path, end = idx_path(prefix), 0
    for start in range(0, len(lengths), _BLOCK):
        sizes = lengths[start : start + _BLOCK].astype(np.int64) * dtype.itemsize
        if sizes.min() < 0:
            first = start + int(np.argmax(sizes < 0))
            raise DataError(f"{path} gives sequence {first} a length of {lengths[first]}: the file is damaged")
        expected = end + np.cumsum(sizes) - sizes
        wrong = offsets[start : start + _BLOCK] != expected
        if wrong.any():
            at = int(np.argmax(wrong))
            raise DataError(
                f"{path} puts sequence {start + at} at byte {offsets[start + at]} of {bin_path(prefix).name}, but by "
                f"the lengths before it, it starts at byte {expected[at]}; the file is damaged"
            )
        end = int(expected[-1] + sizes[-1])
    _check_boundaries(path, boundaries, num_sequences=len(lengths))
    actual = bin_path(prefix).stat().st_size
    if actual != end:
        raise DataError(
            f"{bin_path(prefix)} has {_difference(actual, end)} {path.name} describes: it is incomplete, or the two "
            "files belong to different data sets"
        )
    return end // dtype.itemsize


def _check_files_exist(prefix: str) -> None:
    missing = [path for path in (bin_path(prefix), idx_path(prefix)) if not has_file(path, error=DataError)]
    if not missing:
        return
    stem, ending = prefix[:-4], prefix[-4:]
    if ending in (".bin", ".idx") and idx_path(stem).is_file():
        raise DataError(
            f"{prefix} is a file name, but data paths are prefixes: give {stem}, without the ending {ending}"
        )
    if Path(prefix).is_file():
        made = Path(prefix).name.partition(".")[0]
        raise DataError(
            f"{prefix} is a file, but data paths are the prefix that a .bin and an .idx file share: make them of text "
            f"with tools/preprocess_data.py --input {prefix} --output-prefix {made} --append-eod and the flags of the "
            f"tokenizer, then give {made}_text_document"
        )
    if len(missing) == 2:
        pattern = f"{glob.escape(prefix)}/*.idx" if Path(prefix).is_dir() else f"{glob.escape(prefix)}*.idx"
        meant = " or ".join(path.removesuffix(".idx") for path in sorted(glob.glob(pattern))[:3])
        if meant:
            raise DataError(f"neither {missing[0]} nor {missing[1]} exists; did you mean {meant}?")
        raise DataError(
            f"neither {missing[0]} nor {missing[1]} exists: a data path is the prefix of both files, as written by "
            "tools/preprocess_data.py --output-prefix (it ends in _text_document or similar)"
        )
    other = idx_path(prefix) if missing[0].suffix == ".bin" else bin_path(prefix)
    raise DataError(f"{missing[0]} is missing, but {other.name} is there: copy it too, or write both again")


def _check_magic(prefix: str, first: bytes) -> None:
    path = idx_path(prefix)
    if not first:
        raise DataError(f"{path} is empty: copy or write it again")
    with bin_path(prefix).open("rb") as file:
        bin_is_index = file.read(len(MAGIC)) == MAGIC
    if first.startswith(MAGIC):
        if bin_is_index:
            raise DataError(f"{bin_path(prefix)} holds an index instead of tokens, like {path.name}: copy it again")
        return
    if bin_is_index:
        raise DataError(f"{bin_path(prefix)} and {path.name} are swapped: the .bin file holds the index; rename both")
    if first.startswith(_OLD_MAGIC):
        raise DataError(
            f"{path} has the format of --data-impl lazy or cached, which is no longer supported: preprocess the "
            "text again"
        )
    raise DataError(f"{path} is not an index of a data set: it starts with {first[: len(MAGIC)]!r}, not {MAGIC!r}")


def _check_boundaries(path: Path, boundaries: NDArray[np.int64], *, num_sequences: int) -> None:
    if len(boundaries) == 0 or boundaries[0] != 0 or boundaries[-1] != num_sequences:
        ends = f"{boundaries[0]} to {boundaries[-1]}" if len(boundaries) else "nowhere"
        raise DataError(f"{path} has documents from sequence {ends}, not 0 to {num_sequences}: the file is damaged")
    for start in range(0, len(boundaries) - 1, _BLOCK):
        falling = np.diff(boundaries[start : start + _BLOCK + 1]) < 0
        if falling.any():
            at = start + int(np.argmax(falling))
            raise DataError(
                f"{path} ends document {at} at sequence {boundaries[at + 1]}, before its start at sequence "
                f"{boundaries[at]}: the file is damaged"
            )


def _difference(actual: int, needed: int) -> str:
    word = "fewer" if actual < needed else "more"
    return f"{actual} bytes, {abs(actual - needed)} {word} than the {needed} that"
