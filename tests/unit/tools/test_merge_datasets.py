"""Merging keeps every document, in order, and refuses what would mix up tokens or lose files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron.core.datasets.metadata import DatasetMetadata, TokenizerStamp
from megatron.core.tokenizers.chat_settings import ChatSettings
from megatron.errors import DataError
from tests.harness.sentences import check_line, check_sentence, expect_error
from tools.merge_datasets import main

GPT2 = TokenizerStamp("GPT2BPETokenizer", 50257, 50256, "aa" * 32)
LLAMA = TokenizerStamp("HuggingFaceTokenizer", 32000, 2, "bb" * 32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "parts"
    path.mkdir()
    return path


def flip(path: Path, at: int) -> None:
    """Change a bit of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def write(prefix: Path, documents: list[list[list[int]]], *, dtype: Any = np.uint16, **options: Any) -> None:
    with IndexedDatasetWriter(prefix, dtype, **options) as writer:
        for document in documents:
            writer.add_document(*document, modes=range(len(document)))


def merge(folder: Path, *options: str) -> str:
    prefix = str(folder.parent / "merged")
    assert main(["--input", str(folder), "--output-prefix", prefix, *options]) == 0
    return prefix


def test_documents_follow_in_the_order_of_the_names(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Documents of several sequences stay together; other files in the folder are left alone."""
    write(folder / "b", [[[4, 5], [6]], []], tokenizer=GPT2)
    write(folder / "a", [[[1]], [[2, 3]]], tokenizer=GPT2)
    (folder / "notes.txt").write_text("")
    prefix = merge(folder)
    merged = IndexedDataset(prefix)
    assert [sequence.tolist() for sequence in merged[:]] == [[1], [2, 3], [4, 5], [6]]
    assert merged.boundaries.tolist() == [0, 1, 2, 4, 4]
    assert DatasetMetadata.read(prefix) == DatasetMetadata(
        tokenizer=GPT2, num_tokens=6, num_sequences=4, num_documents=4, max_token_id=6, sha256=merged.digests()
    )
    check_line(capsys.readouterr().out, "2 data sets", "4 documents", "4 sequences", "6 tokens")


def test_modes_are_kept(folder: Path) -> None:
    """Multimodal data keep what each sequence is."""
    for name in "ab":
        write(folder / name, [[[1], [2]], [[3]]], multimodal=True)
    merged = IndexedDataset(merge(folder, "--multimodal"), multimodal=True)
    assert merged.modes is not None
    assert merged.modes.tolist() == [0, 1, 0, 0, 1, 0]


def test_damaged_data_are_not_merged(folder: Path) -> None:
    """A flipped bit would get a digest that calls it right."""
    for name in "ab":
        write(folder / name, [[[1], [2]], [[3]]])
    flip(folder / "b.bin", 5)
    with expect_error(DataError, "b.bin", "SHA-256"):
        merge(folder)
    (folder / "b.meta.json").unlink()
    merge(folder)


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_half_a_pair_is_an_error(folder: Path, ending: str) -> None:
    """Skipping it would lose data without a word."""
    write(folder / "a", [[[1]]])
    write(folder / "b", [[[1]]])
    (folder / f"a{ending}").unlink()
    with expect_error(DataError, f"parts/a{ending}", "--input"):
        merge(folder)
    assert not list(folder.parent.glob("merged*"))


def test_two_tokenizers_are_an_error(folder: Path) -> None:
    """The same id would mean two things."""
    write(folder / "a", [[[1]]], tokenizer=GPT2)
    write(folder / "b", [[[1]]], tokenizer=LLAMA)
    with expect_error(DataError, "GPT2BPETokenizer", "HuggingFaceTokenizer"):
        merge(folder)


def test_a_part_of_unknown_origin_makes_the_whole_unknown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Claiming a tokenizer for it would switch off the check it needs."""
    write(folder / "a", [[[1]]], tokenizer=GPT2)
    write(folder / "b", [[[1]]])
    metadata = DatasetMetadata.read(merge(folder))
    assert metadata is not None
    assert metadata.tokenizer is None
    check_line(capsys.readouterr().err, folder / "b")


def test_two_types_are_an_error(folder: Path) -> None:
    """A file has one type for all its tokens."""
    write(folder / "a", [[[1]]])
    write(folder / "b", [[[1]]], dtype=np.int32)
    with expect_error(DataError, "int32", "uint16"):
        merge(folder)


def test_damaged_part_is_an_error(folder: Path) -> None:
    """Every part is checked before anything is written."""
    write(folder / "a", [[[1]]])
    write(folder / "b", [[[1, 2]]])
    (folder / "b.bin").write_bytes(b"\x01")
    with expect_error(DataError, "b.bin", "1 bytes", "3"):
        merge(folder)
    assert not list(folder.parent.glob("merged*"))


def test_output_among_the_inputs_is_an_error(folder: Path) -> None:
    """Merging a second time would take the first result for one more part."""
    write(folder / "a", [[[1]]])
    with expect_error(DataError, "--output-prefix", "parts/a"):
        main(["--input", str(folder), "--output-prefix", str(folder / "a")])


def test_nothing_to_merge(folder: Path) -> None:
    """An empty folder, or none, is a slip of the command line."""
    with expect_error(DataError):
        merge(folder)
    with expect_error(DataError):
        merge(folder / "absent")


def test_command_ends_with_one_sentence(folder: Path) -> None:
    """No traceback, and a code that a script notices."""
    script = Path(__file__).parents[3] / "tools" / "merge_datasets.py"
    command = [sys.executable, str(script), "--input", str(folder), "--output-prefix", str(folder / "x")]
    ran = subprocess.run(
        command, env={"PYTHONPATH": str(script.parents[1])}, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1
    check_sentence(ran.stderr.removesuffix("\n"), "error", "--input")


CHAT = ChatSettings(template="{{ messages }}", end_tokens=(5,))


def write_sft(prefix: Path, chat: ChatSettings | None, ids: list[int]) -> None:
    with IndexedDatasetWriter(prefix, np.uint16, tokenizer=GPT2) as writer:
        writer.add_document(ids)
        writer.chat = chat
    write(Path(f"{prefix}_targets"), [[[1] * len(ids)]], dtype=np.uint8)


def test_conversations_are_merged_with_their_targets_and_format(folder: Path) -> None:
    """Token files and targets were taken for data of two types; the format, and so the end of answers, was lost.

    Where a format leaves the end of an answer to the next turn's mark, parts of one data set end with different marks.
    """
    write_sft(folder / "a", CHAT, [1, 2])
    write_sft(folder / "b", ChatSettings(template=CHAT.template, end_tokens=(2, 5)), [3])
    write_sft(folder / "pairs", ChatSettings(template=None, end_tokens=()), [4])
    prefix = merge(folder)
    assert [each.tolist() for each in IndexedDataset(prefix)[:]] == [[1, 2], [3], [4]]
    assert [each.tolist() for each in IndexedDataset(f"{prefix}_targets")[:]] == [[1, 1], [1], [1]]
    found = DatasetMetadata.read(prefix)
    assert found is not None
    assert found.chat == ChatSettings(template=CHAT.template, end_tokens=(2, 5))


def test_other_formats_are_refused(folder: Path) -> None:
    """A model can't tell two formats apart when it is asked in one."""
    write_sft(folder / "a", CHAT, [1, 2])
    write_sft(folder / "b", ChatSettings(template="x", end_tokens=(5,)), [3])
    with expect_error(DataError):
        merge(folder)
    assert not (folder.parent / "merged.idx").exists()


def test_conversations_beside_other_data(folder: Path) -> None:
    write_sft(folder / "a", CHAT, [1, 2])
    write(folder / "text", [[[1]]], tokenizer=GPT2)
    with expect_error(DataError, "--input"):
        merge(folder)
