"""A damaged pair of files is refused when it is opened, in one sentence: otherwise it trains on noise."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.config.tokenizer import TokenizerConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron.core.datasets.indexed_format import token_dtype
from megatron.core.datasets.metadata import DatasetMetadata
from megatron.core.tokenizers.build import build_tokenizer
from megatron.errors import DataError
from tests.harness.sentences import expect_error

Damage = Callable[[Path, Path], object]


def remove(*paths: Path) -> None:
    for path in paths:
        path.unlink()


def overwrite(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def swap(first: Path, second: Path) -> None:
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)


# Three sequences of 3, 2 and 1 tokens in two documents: lengths at byte 34, offsets at 46, boundaries at 70, end at 94.
DAMAGES: dict[str, tuple[Damage, str]] = {
    "no bin": (lambda b, i: b.unlink(), r"x\.bin is missing, but x\.idx is there: copy it too, or write both again"),
    "no idx": (lambda b, i: i.unlink(), r"x\.idx is missing, but x\.bin is there: copy it too, or write both again"),
    "neither": (
        remove,
        r"neither .*x\.bin nor .*x\.idx exists: a data path is the prefix",
    ),
    "bin cut": (
        lambda b, i: b.write_bytes(b.read_bytes()[:-3]),
        r"x\.bin has 9 bytes, 3 fewer than the 12 that x\.idx describes: it is incomplete, or the two files belong",
    ),
    "bin of another": (
        lambda b, i: b.write_bytes(bytes(20)),
        r"x\.bin has 20 bytes, 8 more than the 12 that x\.idx describes",
    ),
    "bin empty": (lambda b, i: b.write_bytes(b""), r"x\.bin has 0 bytes, 12 fewer than the 12"),
    "idx cut": (
        lambda b, i: i.write_bytes(i.read_bytes()[:-5]),
        r"x\.idx has 89 bytes, 5 fewer than the 94 that its 3 sequences and 3 document boundaries take: it is",
    ),
    "idx too long": (
        lambda b, i: i.write_bytes(i.read_bytes() + bytes(5)),
        r"x\.idx has 99 bytes, 5 more than the 94 that its 3 sequences",
    ),
    "idx multimodal": (lambda b, i: i.write_bytes(i.read_bytes() + bytes(3)), "it holds modes: a multimodal data set"),
    "idx cut in its header": (
        lambda b, i: i.write_bytes(i.read_bytes()[:20]),
        "ends after 20 bytes, inside its header",
    ),
    "idx empty": (lambda b, i: i.write_bytes(b""), r"x\.idx is empty: copy or write it again"),
    "swapped": (swap, r"x\.bin and x\.idx are swapped: the \.bin file holds the index; rename both"),
    "bin is a copy of idx": (
        lambda b, i: b.write_bytes(i.read_bytes()),
        r"x\.bin holds an index instead of tokens, like x\.idx",
    ),
    "bad magic": (
        lambda b, i: overwrite(i, 0, b"GARBAGE!!"),
        "is not an index of a data set: it starts with b'GARB",
    ),
    "old format": (lambda b, i: overwrite(i, 0, b"TNTIDX\0\0"), "has the format of --data-impl lazy or cached"),
    "bad version": (lambda b, i: overwrite(i, 9, struct.pack("<Q", 7)), "has format version 7; only version 1 exists"),
    "bad type": (lambda b, i: overwrite(i, 17, b"\x09"), "has token type code 9; codes are 1 to 8"),
    "absurd count": (
        lambda b, i: overwrite(i, 18, struct.pack("<Q", 2**60)),
        "fewer than the 13835058055282163770 that its 1152921504606846976 sequences",
    ),
    "negative length": (lambda b, i: overwrite(i, 38, struct.pack("<i", -2)), "gives sequence 1 a length of -2"),
    "offset beyond the end": (
        lambda b, i: overwrite(i, 62, struct.pack("<q", 10**12)),
        r"puts sequence 2 at byte 1000000000000 of x\.bin, but by the lengths before it, it starts at",
    ),
    "negative offset": (lambda b, i: overwrite(i, 46, struct.pack("<q", -4)), r"puts sequence 0 at byte -4 of x\.bin"),
    "length too large": (
        lambda b, i: overwrite(i, 34, struct.pack("<i", 99)),
        "by the lengths before it, it starts at",
    ),
    "documents end early": (
        lambda b, i: overwrite(i, 86, struct.pack("<q", 2)),
        "has documents from sequence 0 to 2, not 0 to 3",
    ),
    "documents go back": (
        lambda b, i: overwrite(i, 78, struct.pack("<q", 4)),
        "ends document 1 at sequence 3, before its start at sequence 4",
    ),
}


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    with IndexedDatasetWriter(tmp_path / "x", "uint16") as writer:
        writer.add_document([1, 2, 3], [4, 5])
        writer.add_document([6])
    return str(tmp_path / "x")


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_files_are_refused_with_one_sentence(prefix: str, name: str) -> None:
    """Each kind of damage names the file, what is wrong with its values, and what to do."""
    damage, message = DAMAGES[name]
    damage(Path(f"{prefix}.bin"), Path(f"{prefix}.idx"))
    with pytest.raises(DataError, match=message) as caught:
        IndexedDataset(prefix)
    assert "\n" not in str(caught.value)


def test_every_changed_byte_of_the_index_is_noticed(prefix: str) -> None:
    """The format has no checksum, but its tables say everything twice, so flipping any byte must not go unseen."""
    path = Path(f"{prefix}.idx")
    whole = path.read_bytes()
    # A changed boundary inside the range still is a valid document, and a changed type of the same size valid tokens.
    undetectable = {17} | set(range(78, 86))
    for offset in set(range(len(whole))) - undetectable:
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 0x55]) + whole[offset + 1 :])
        with pytest.raises(DataError):
            IndexedDataset(prefix)


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_a_file_name_instead_of_a_prefix_is_explained(prefix: str, ending: str) -> None:
    """Completing the path in a shell gives the file: the message says what to take off."""
    with expect_error(DataError, ending):
        IndexedDataset(prefix + ending)


def test_modes_must_be_announced(prefix: str) -> None:
    """The header doesn't say whether modes follow: a plain file read as multimodal is noticed by its size."""
    with expect_error(DataError, "3", "97", "--multimodal"):
        IndexedDataset(prefix, multimodal=True)


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(1, "uint16"), (65499, "uint16"), (65500, "int32"), (256000, "int32"), (None, "int32")]
)
def test_type_of_the_tokens_follows_the_vocabulary(vocab_size: int | None, dtype: str) -> None:
    """The same files come out as from Megatron-LM only if the type switches at the same size."""
    assert token_dtype(vocab_size) == dtype


def test_a_data_path_that_is_no_prefix_says_what_to_do(prefix: str, tmp_path: Path) -> None:
    """``--data-path docs.jsonl``, and a prefix without what preprocessing appends to it, are usual first mistakes."""
    (tmp_path / "docs.jsonl.gz").write_bytes(b"text")
    with expect_error(DataError, "docs.jsonl.gz", "--input", "--output-prefix docs"):
        IndexedDataset(tmp_path / "docs.jsonl.gz")
    for path in tmp_path.glob("x.*"):
        path.rename(path.with_name(path.name.replace("x", "docs[1]_text_document", 1)))
    with expect_error(DataError, "/docs[1]_text_document"):
        IndexedDataset(tmp_path / "docs[1]")
    with expect_error(DataError, "/docs[1]_text_document"):
        IndexedDataset(tmp_path)


@pytest.mark.parametrize(("number", "code"), [(errno.EACCES, 2), (errno.EIO, 1)])
def test_files_that_cannot_be_read_are_named(
    prefix: str, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    """A missing permission or a failed disk ended in a traceback, of the data, their metadata and tokenizers alike."""
    vocabulary = Path(prefix).with_name("vocab.json")
    vocabulary.write_text("{}")
    bert = TokenizerConfig(tokenizer_type="BertWordPieceCase", vocab_file=str(vocabulary))
    opened = Path.open
    reads: dict[str, Callable[[], object]] = {
        f"{prefix}.idx": lambda: IndexedDataset(prefix),
        f"{prefix}.bin": lambda: IndexedDataset(prefix),
        f"{prefix}.meta.json": lambda: DatasetMetadata.read(prefix),
        str(vocabulary): lambda: build_tokenizer(bert),
    }
    for name, read in reads.items():

        def refuse(path: Path, *arguments: Any, name: str = name, **options: Any) -> Any:
            if str(path) == name:
                raise OSError(number, os.strerror(number), name)
            return opened(path, *arguments, **options)

        monkeypatch.setattr(Path, "open", refuse)
        with pytest.raises(DataError) as caught:
            read()
        assert str(caught.value).startswith(f"{name} cannot be read: {os.strerror(number)}")
        assert caught.value.exit_code == code
