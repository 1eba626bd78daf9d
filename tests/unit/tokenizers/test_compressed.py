"""Compressed files of several streams, whole and damaged at every place that matters."""

from __future__ import annotations

import bz2
import gzip
import lzma
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from megatron.core.tokenizers.compressed import ENDINGS
from megatron.core.tokenizers.text_files import read_batches
from megatron.errors import DataError
from tests.harness.sentences import check_line, check_sentence

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
}
PADDED = (".gz", ".xz")  # formats that allow zeros after a stream
PARTS = [b"".join(b"%d %d\n" % (part, line * line) for line in range(1000)) for part in range(3)]


def content_of(folder: Path, ending: str, packed: bytes) -> bytes:
    path = folder / f"in.jsonl{ending}"
    path.write_bytes(packed)
    return b"".join(batch.data for batch in read_batches([str(path)]))


def refusal_of(folder: Path, ending: str, packed: bytes) -> str:
    with pytest.raises(DataError) as caught:
        content_of(folder, ending, packed)
    sentence = str(caught.value)
    assert sentence.startswith(f"--input {folder / 'in.jsonl'}{ending} cannot be read after line ")
    return sentence


@pytest.fixture(params=ENDINGS)
def ending(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_damaged_header_behind_the_first_stream_is_an_error(tmp_path: Path, ending: str) -> None:
    """One wrong bit in the second header of a .bz2 lost 2,000 of 3,000 documents, and the exit code was 0."""
    first, *others = map(PACKERS[ending], PARTS)
    assert content_of(tmp_path, ending, first + b"".join(others)) == b"".join(PARTS)
    for byte in range(4):
        damaged = bytearray(others[0])
        damaged[byte] ^= 0x10
        found = refusal_of(tmp_path, ending, first + bytes(damaged) + others[1])
        check_line(found, f"byte {len(first)}")


def test_what_follows_the_last_stream_is_an_error(tmp_path: Path, ending: str) -> None:
    """Whatever is there is data somebody meant to be read."""
    packed = PACKERS[ending](PARTS[0])
    for rest in (b"g", b"garbage", b"\n", b"{}\n" * 5000, b"\0" * 8 + b"garbage"):
        check_sentence(refusal_of(tmp_path, ending, packed + rest))


def test_zeros_after_a_stream_are_padding_where_the_format_has_it(tmp_path: Path, ending: str) -> None:
    """Tapes fill blocks with zeros, and gzip and xz allow for it; a file of zeros alone is what a crash leaves."""
    packed = PACKERS[ending](PARTS[0])
    for size in (4, 512, 10_000):
        zeros = bytes(size)
        if ending in PADDED:
            assert content_of(tmp_path, ending, packed + zeros) == PARTS[0]
            assert content_of(tmp_path, ending, packed + zeros + packed + zeros) == PARTS[0] * 2
        else:
            check_sentence(refusal_of(tmp_path, ending, packed + zeros), f"byte {len(packed)}")
        refusal_of(tmp_path, ending, zeros)


def test_a_file_cut_within_a_stream_is_an_error(tmp_path: Path, ending: str) -> None:
    """A copy that broke off is noticed at any length but between two streams, where it is a shorter valid file."""
    first, second = map(PACKERS[ending], PARTS[:2])
    for size in (0, 1, 3, len(first) // 2, len(first) - 1, len(first) + 1, len(first) + 5, len(first + second) - 1):
        refusal_of(tmp_path, ending, (first + second)[:size])
    assert content_of(tmp_path, ending, first) == PARTS[0]


def test_every_flipped_bit_is_noticed(tmp_path: Path, ending: str) -> None:
    """Headers, content and checksums of the second stream: other text must not come out, nor less of it."""
    pack = PACKERS[ending] if ending != ".zst" else zstandard.ZstdCompressor(write_checksum=True).compress
    first, second = pack(b"one\n" * 4), pack(b"two\n" * 4)
    harmless = 0
    for bit in range(8 * len(second)):
        damaged = bytearray(first + second)
        damaged[len(first) + bit // 8] ^= 1 << bit % 8
        try:
            harmless += 1
            assert content_of(tmp_path, ending, bytes(damaged)) == b"one\n" * 4 + b"two\n" * 4
        except DataError:
            harmless -= 1
    assert harmless <= 8 * 10  # gzip's time stamp, system and the like: nothing that the content follows from


def test_skippable_frames_hold_no_text(tmp_path: Path) -> None:
    """pzstd writes sizes into frames that readers pass over."""
    skippable = struct.pack("<II", 0x184D2A50, 5) + b"hello"
    packed = skippable + zstandard.compress(b"a\n") + skippable + zstandard.compress(b"b\n") + skippable
    assert content_of(tmp_path, ".zst", packed) == b"a\nb\n"
