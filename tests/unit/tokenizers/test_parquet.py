"""Parquet input: rows are documents, in order, from any row on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.core.tokenizers.input_files import find_inputs
from megatron.core.tokenizers.line_batches import LineBatch, Position
from megatron.core.tokenizers.text_files import read_batches, read_documents
from megatron.errors import ConfigError, DataError
from tests.harness.sentences import expect_error

TEXTS = [f"text {number} " * (number % 7) for number in range(1000)]


@pytest.fixture
def parquet() -> Any:
    return pytest.importorskip("pyarrow.parquet", reason="pyarrow, which reads Parquet, is not installed")


@pytest.fixture
def path(tmp_path: Path, parquet: Any) -> str:
    import pyarrow  # type: ignore[import-not-found, unused-ignore]

    table = pyarrow.table({"text": TEXTS, "number": list(range(len(TEXTS))), "other": ["é"] * len(TEXTS)})
    parquet.write_table(table, tmp_path / "in.parquet", row_group_size=130)
    return str(tmp_path / "in.parquet")


def texts(batches: list[LineBatch], key: str = "text") -> list[str]:
    return [text for batch in batches for text in read_documents(batch, [key]).texts[key]]


def test_every_row_is_a_document(path: str) -> None:
    batches = list(read_batches([path], keys=["text", "other"], batch_bytes=500))
    assert texts(batches) == TEXTS
    assert set(texts(batches, "other")) == {"é"}
    assert [batch.bytes_read for batch in batches] == sorted(batch.bytes_read for batch in batches)
    assert find_inputs([str(Path(path).parent)]) == [path]


def test_reading_goes_on_at_any_batch(path: str) -> None:
    batches = list(read_batches([path], keys=["text"], batch_bytes=500))
    for number in (0, 1, len(batches) // 2, len(batches) - 1):
        rest = list(read_batches([path], keys=["text"], start=batches[number].end, batch_bytes=500))
        assert texts(rest) == texts(batches[number + 1 :])


def test_wrong_columns_and_files(path: str, tmp_path: Path) -> None:
    with expect_error(DataError):
        list(read_batches([path], keys=["title"]))
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    with expect_error(DataError, "0"):
        list(read_batches([str(tmp_path / "bad.parquet")], keys=["text"]))
    assert read_documents(next(read_batches([path], keys=["number"])), ["number"]).bad[0].reason.startswith("a number")


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is optional, so a user must read what to install."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with expect_error(ConfigError):
        list(read_batches([str(tmp_path / "in.parquet")], keys=["text"], start=Position()))
