"""tools/preprocess_data.py after an interruption: it goes on from its last finished shard, to the same bytes."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from megatron.core.datasets.indexed_dataset import IndexedDatasetWriter
from megatron.errors import DataError
from megatron.preprocessing import conversion
from tests.harness.sentences import check_line, expect_error
from tools import preprocess_data

NULL = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "9", "--workers", "1", "--json-keys", "text", "other")
LINES = "".join(
    json.dumps({"text": f"{number % 9} " * (number % 900), "other": "1 2"}) + "\n" for number in range(3000)
)
ENDINGS = (".bin", ".idx", ".meta.json")


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "SHARD_BYTES", 1)  # every batch


@pytest.fixture
def inputs(tmp_path: Path) -> list[Path]:
    """Two files of two batches and more, one of them packed."""
    half = LINES[: LINES.index("\n", len(LINES) // 2) + 1]
    (tmp_path / "a.jsonl").write_text(half)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(LINES[len(half) :].encode(), 1))
    assert len(half) > 2 * (1 << 19), "too little for several batches"
    return [tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"]


def preprocess(inputs: list[Path], prefix: Path, *more: str) -> dict[str, bytes]:
    preprocess_data.main(["--input", *map(str, inputs), "--output-prefix", str(prefix), *NULL, *more])
    return {
        key + ending: Path(f"{prefix}_{key}_document{ending}").read_bytes()
        for key in ("text", "other")
        for ending in ENDINGS
    }


def interrupt(monkeypatch: pytest.MonkeyPatch, inputs: list[Path], prefix: Path, *, after: int) -> None:
    """A run that ends in the middle of writing batch number ``after``."""
    add, calls = IndexedDatasetWriter.add_documents, 0

    def add_some(self: IndexedDatasetWriter, *arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 2 * after:
            add(self, *arguments)  # written, but not in the journal: it must not be written twice
            raise KeyboardInterrupt
        add(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(IndexedDatasetWriter, "add_documents", add_some)
        with expect_error(KeyboardInterrupt):
            preprocess(inputs, prefix)


@pytest.mark.parametrize("after", [1, 3, 5])
def test_it_goes_on_to_the_same_bytes(
    tmp_path: Path,
    inputs: list[Path],
    after: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Hours of work are not lost to a stopped job, and nobody can tell from the files that it stopped."""
    whole = preprocess(inputs, tmp_path / "whole")
    interrupt(monkeypatch, inputs, tmp_path / "out", after=after)
    assert not list(tmp_path.glob("out*.idx")), "files must not appear before they are complete"
    capsys.readouterr()
    assert preprocess(inputs, tmp_path / "out") == whole
    check_line(capsys.readouterr().err, "documents", "interrupted")
    summaries = [json.loads((tmp_path / f"{name}_summary.json").read_text()) for name in ("whole", "out")]
    assert summaries[0]["documents"] == summaries[1]["documents"] == 3000
    assert [list(each["outputs"].values()) for each in summaries[:1]] == [list(summaries[1]["outputs"].values())]
    assert sorted(path.name for path in tmp_path.glob("out*") if "part" in path.name or "unfin" in path.name) == []


@pytest.mark.parametrize("change", ["settings", "input"])
def test_another_run_begins_anew(
    tmp_path: Path,
    inputs: list[Path],
    change: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What an interrupted run left must not become the first half of other data."""
    interrupt(monkeypatch, inputs, tmp_path / "out", after=3)
    more = ("--append-eod",) if change == "settings" else ()
    if change == "input":
        inputs[0].write_text(LINES[: LINES.index("\n", len(LINES) // 3) + 1])
    capsys.readouterr()
    assert preprocess(inputs, tmp_path / "out", *more) == preprocess(inputs, tmp_path / "whole", *more)
    assert "interrupted run" not in capsys.readouterr().err


def test_a_mended_file_further_on_does_not_cost_what_came_before(
    tmp_path: Path, inputs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A bad line in the second file stops the run; with the line mended, the first file is not read again."""
    good = inputs[1].read_bytes()
    inputs[1].write_bytes(gzip.compress(b"oops\n"))
    with expect_error(DataError):
        preprocess(inputs, tmp_path / "out")
    inputs[1].write_bytes(good)
    capsys.readouterr()
    assert preprocess(inputs, tmp_path / "out") == preprocess(inputs, tmp_path / "whole")
    check_line(capsys.readouterr().err, "interrupted")


def test_a_part_that_lost_its_end_is_an_error(
    tmp_path: Path, inputs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash of the machine can shorten a file; it was filled up with zeros, which trained as tokens."""
    interrupt(monkeypatch, inputs, tmp_path / "out", after=3)
    os.truncate(tmp_path / "out_text_document.bin.part", 100)
    with expect_error(DataError, "out_text_document.bin.part"):
        preprocess(inputs, tmp_path / "out")
    os.unlink(tmp_path / "out_text_document.bin.part")
    assert preprocess(inputs, tmp_path / "out") == preprocess(inputs, tmp_path / "whole")


def test_lost_parts_mean_a_new_start(tmp_path: Path, inputs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody tidied up between the two runs."""
    interrupt(monkeypatch, inputs, tmp_path / "out", after=3)
    os.unlink(tmp_path / "out_text_document.bin.part")
    assert preprocess(inputs, tmp_path / "out") == preprocess(inputs, tmp_path / "whole")
