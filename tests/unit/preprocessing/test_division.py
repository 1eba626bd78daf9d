"""Pieces of the input: every line is in exactly one of them, and they begin where lines do."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from megatron.core.tokenizers.input_files import InputFile, list_inputs
from megatron.core.tokenizers.text_files import read_batches
from megatron.errors import ConfigError
from megatron.preprocessing.division import Division, divide, lines_before
from tests.harness.sentences import expect_error


def texts(division: Division, number: int) -> list[bytes]:
    """The lines of a piece."""
    piece, paths = division.piece(number), [each.path for each in division.files]
    batches = read_batches(paths, keys=["text"], start=piece.start, stop=piece.stop, batch_bytes=50)
    return [line for batch in batches for line in batch.data.splitlines()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Plain files with short and long lines, an empty one, a packed one."""
    lines = [json.dumps({"text": "x" * (number * 37 % 90 if number != 40 else 700)}) for number in range(80)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines[:50]))
    (tmp_path / "b.jsonl").write_text("")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress("\n".join(lines[50:60]).encode()))
    (tmp_path / "d.jsonl").write_text("".join(line + "\n" for line in lines[60:]))
    return tmp_path


@pytest.mark.parametrize("piece_bytes", [7, 97, 500, 10**6])
def test_every_line_is_in_one_piece(folder: Path, piece_bytes: int) -> None:
    division = divide(list_inputs([str(folder)]), piece_bytes=piece_bytes)
    found = [texts(division, number) for number in range(division.count)]
    lines = [json.loads(line)["text"] for piece in found for line in piece]
    assert [len(line) for line in lines] == [number * 37 % 90 if number != 40 else 700 for number in range(80)]
    assert sum(map(bool, found)) > 3 or piece_bytes > 1000


def test_lines_before_a_piece_are_counted(folder: Path) -> None:
    division = divide(list_inputs([str(folder / "a.jsonl")]), piece_bytes=500)
    before = 0
    for number in range(division.count):
        start = division.piece(number).start
        assert start.file == 1 or lines_before(division.files[0].path, start) == before
        before += len(texts(division, number))


def test_pieces_of_parquet_are_groups_of_rows(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [f"text {number}" for number in range(100)]
    parquet.write_table(pyarrow.table({"text": rows}), tmp_path / "a.parquet", row_group_size=7)
    parquet.write_table(pyarrow.table({"text": rows}), tmp_path / "b.parquet", row_group_size=100)
    size = (tmp_path / "a.parquet").stat().st_size
    division = divide(list_inputs([str(tmp_path)]), piece_bytes=size // 5)
    found = [texts(division, number) for number in range(division.count)]
    assert [json.loads(line)["text"] for piece in found for line in piece] == rows * 2
    assert sum(map(bool, found)) > 3


def test_size_of_pieces_follows_the_input(folder: Path) -> None:
    """A function of the input alone: any number of machines divides it in the same way."""
    small = divide(list_inputs([str(folder)]))
    assert (small.count, small.piece_bytes) == (1, 16 << 20)


def test_more_than_a_million_pieces_are_refused() -> None:
    """A size in gigabytes or bytes instead of megabytes would fill a folder, or the memory, with numbers."""
    with expect_error(ConfigError, "--piece-megabytes"):
        divide([InputFile("a.jsonl", "a.jsonl", 10**9, "")], piece_bytes=900)
