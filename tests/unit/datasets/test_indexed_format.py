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
DAMAGES: dict[str, Damage] = {
    "no bin": lambda b, i: b.unlink(),
    "no idx": lambda b, i: i.unlink(),
    "neither": remove,
    "bin cut": lambda b, i: b.write_bytes(b.read_bytes()[:-3]),
    "bin of another": lambda b, i: b.write_bytes(bytes(20)),
    "bin empty": lambda b, i: b.write_bytes(b""),
    "idx cut": lambda b, i: i.write_bytes(i.read_bytes()[:-5]),
    "idx too long": lambda b, i: i.write_bytes(i.read_bytes() + bytes(5)),
    "idx multimodal": lambda b, i: i.write_bytes(i.read_bytes() + bytes(3)),
    "idx cut in its header": lambda b, i: i.write_bytes(i.read_bytes()[:20]),
    "idx empty": lambda b, i: i.write_bytes(b""),
    "swapped": swap,
    "bin is a copy of idx": lambda b, i: b.write_bytes(i.read_bytes()),
    "bad magic": lambda b, i: overwrite(i, 0, b"GARBAGE!!"),
    "old format": lambda b, i: overwrite(i, 0, b"TNTIDX\0\0"),
    "bad version": lambda b, i: overwrite(i, 9, struct.pack("<Q", 7)),
    "bad type": lambda b, i: overwrite(i, 17, b"\x09"),
    "absurd count": lambda b, i: overwrite(i, 18, struct.pack("<Q", 2**60)),
    "negative length": lambda b, i: overwrite(i, 38, struct.pack("<i", -2)),
    "offset beyond the end": lambda b, i: overwrite(i, 62, struct.pack("<q", 10**12)),
    "negative offset": lambda b, i: overwrite(i, 46, struct.pack("<q", -4)),
    "length too large": lambda b, i: overwrite(i, 34, struct.pack("<i", 99)),
    "documents end early": lambda b, i: overwrite(i, 86, struct.pack("<q", 2)),
    "documents go back": lambda b, i: overwrite(i, 78, struct.pack("<q", 4)),
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
    DAMAGES[name](Path(f"{prefix}.bin"), Path(f"{prefix}.idx"))
    with expect_error(DataError) as caught:
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
        with expect_error(DataError, name, os.strerror(number), exit_code=code):
            read()
