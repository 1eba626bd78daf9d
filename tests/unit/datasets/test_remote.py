"""Data in object storage: the same tokens, fetched once, whatever happens at the other end."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.config.data import DataConfig
from megatron.core.datasets import remote
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron.core.datasets.splits import SplitSizes
from megatron.core.models.gpt.data import build_gpt_splits
from megatron.errors import ConfigError, DataError
from tests.harness.bucket import empty_memory
from tests.harness.sentences import expect_error
from tests.unit.datasets.conftest import FakeTokenizer, WriteDocuments

fsspec = pytest.importorskip("fsspec", reason="fsspec, which opens object storage, comes with torch")
DOCUMENTS = [[number % 50] * (7 + number % 5) for number in range(400)]


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A storage in memory, with blocks of 512 bytes; counts what is fetched of tokens."""
    monkeypatch.setattr(remote, "BLOCK", 512)
    files = fsspec.filesystem("memory")
    files.fetched = []
    cat_file = files.cat_file

    def counting(path: str, *, start: int, end: int) -> bytes:
        files.fetched.append(start)
        return bytes(cat_file(path, start=start, end=end))

    monkeypatch.setattr(files, "cat_file", counting)
    yield files
    empty_memory()


@pytest.fixture
def prefix(bucket: Any, write_documents: WriteDocuments) -> str:
    upload(bucket, write_documents(DOCUMENTS, tokenizer=FakeTokenizer()))
    return "memory://bucket/data"


def upload(bucket: Any, local: str) -> None:
    for ending in (".bin", ".idx", ".meta.json"):
        bucket.pipe_file(f"/bucket/data{ending}", Path(local + ending).read_bytes())


@pytest.mark.parametrize("mmap", [True, False])
def test_the_same_tokens_fetched_once(prefix: str, bucket: Any, tmp_path: Path, mmap: bool) -> None:
    """Only the blocks that are read; a second run, and another process, find them on the disk."""
    data = IndexedDataset(prefix, mmap=mmap, cache=tmp_path / "cache")
    assert bucket.fetched == []
    assert data[300].tolist() == DOCUMENTS[300]
    assert 1 <= len(bucket.fetched) <= 2
    assert [each.tolist() for each in data[:]] == DOCUMENTS
    blocks = -(-data.num_tokens * 2 // 512)
    assert sorted(bucket.fetched) == [512 * number for number in range(blocks)]
    again = pickle.loads(pickle.dumps(IndexedDataset(prefix, mmap=mmap, cache=tmp_path / "cache")))
    assert [each.tolist() for each in again[:]] == DOCUMENTS
    assert len(bucket.fetched) == blocks


def test_training_reads_it(prefix: str, write_documents: WriteDocuments, tmp_path: Path) -> None:
    """Samples are those of the local files, tokenizer check and all."""
    local = write_documents(DOCUMENTS, tokenizer=FakeTokenizer())
    samples = []
    for path in (prefix, local):
        config = DataConfig(seq_length=16, train_data_path=(path,), data_cache_path=str(tmp_path / "cache"))
        train = build_gpt_splits(config, seed=1, sizes=SplitSizes(50, 0, 0), tokenizer=FakeTokenizer()).train
        assert train is not None
        samples.append([train[index]["tokens"].tolist() for index in range(50)])
    assert samples[0] == samples[1]
    with expect_error(DataError):
        build_gpt_splits(
            DataConfig(seq_length=16, train_data_path=(prefix,), data_cache_path=str(tmp_path / "cache")),
            seed=1,
            sizes=SplitSizes(50, 0, 0),
            tokenizer=FakeTokenizer(fingerprint="other"),
        )


def test_damaged_blocks_are_fetched_again(
    prefix: str, bucket: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One flipped byte in the marks of what was fetched let zeros of a sparse file be read as tokens."""
    first = IndexedDataset(prefix, cache=tmp_path / "cache")
    assert first[0].tolist() == DOCUMENTS[0]
    blocks = -(-first.num_tokens * 2 // 512)
    (marks,) = (tmp_path / "cache").glob("*.crc32")
    flipped = bytearray(marks.read_bytes())
    flipped[-4] ^= 1  # the last block, which was never fetched
    marks.write_bytes(flipped)
    (tokens,) = (tmp_path / "cache").glob("*.bin")
    with tokens.open("r+b") as file:
        file.write(b"\xff")
    assert [each.tolist() for each in IndexedDataset(prefix, cache=tmp_path / "cache")[:]] == DOCUMENTS
    assert sorted(bucket.fetched) == sorted([0, *(512 * number for number in range(blocks))])
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        f"block {block} is damaged, fetched again" for block in (0, blocks - 1)
    ]


def test_replaced_data_are_other_data(prefix: str, bucket: Any, tmp_path: Path) -> None:
    """Blocks of the old version between blocks of the new one would be noise."""
    old = IndexedDataset(prefix, cache=tmp_path / "cache")
    assert old[0].tolist() == DOCUMENTS[0]
    with IndexedDatasetWriter(tmp_path / "new", np.uint16) as writer:
        for document in reversed(DOCUMENTS):
            writer.add_document(document)
    upload(bucket, str(tmp_path / "new"))
    assert [each.tolist() for each in IndexedDataset(prefix, cache=tmp_path / "cache")[:]] == DOCUMENTS[::-1]


def test_what_can_go_wrong(prefix: str, bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with expect_error(ConfigError, "--data-cache-path"):
        IndexedDataset(prefix)
    with expect_error(DataError, "memory://bucket/nothing.idx"):
        IndexedDataset("memory://bucket/nothing", cache=tmp_path)
    with expect_error(ConfigError, "nowhere://x/y.idx"):
        IndexedDataset("nowhere://x/y", cache=tmp_path)
    data = IndexedDataset(prefix, cache=tmp_path / "cache")
    monkeypatch.setattr(bucket, "cat_file", lambda path, *, start, end: b"half")
    with expect_error(DataError, "4", exit_code=1):
        data[0]

    def broken(path: str, *, start: int, end: int) -> bytes:
        raise OSError("connection reset")

    monkeypatch.setattr(bucket, "cat_file", broken)
    with expect_error(DataError, "memory://bucket/data.bin", exit_code=1):
        data[0]
