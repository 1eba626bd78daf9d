"""Ids of another vocabulary train without an error and mean nothing: the file beside the data prevents it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from megatron.core.datasets.metadata import ContentDigests, DatasetMetadata, TokenizerStamp
from megatron.errors import DataError
from tests.harness.damaged import OTHERS, paths, replaced
from tests.harness.sentences import check_sentence, expect_error

GPT2 = TokenizerStamp("GPT2BPETokenizer", 50257, 50256, "aa" * 32)
LLAMA = TokenizerStamp("HuggingFaceTokenizer", 32000, 2, "bb" * 32)
NULL = TokenizerStamp("NullTokenizer", 1000, 999, "cc" * 32)


def metadata(tokenizer: TokenizerStamp | None = GPT2, max_token_id: int | None = 50256) -> DatasetMetadata:
    return DatasetMetadata(
        tokenizer=tokenizer, num_tokens=10, num_sequences=3, num_documents=2, max_token_id=max_token_id
    )


@pytest.mark.parametrize("tokenizer", [GPT2, None])
def test_survives_the_file(tmp_path: Path, tokenizer: TokenizerStamp | None) -> None:
    """What is written is what is read."""
    prefix = str(tmp_path / "x")
    Path(f"{prefix}.meta.json").write_text(metadata(tokenizer).to_json())
    assert DatasetMetadata.read(prefix) == metadata(tokenizer)


def test_data_without_metadata_has_none(tmp_path: Path) -> None:
    """Megatron-LM writes no such file, and its data must work."""
    assert DatasetMetadata.read(str(tmp_path / "x")) is None


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"tokenizer": null}', '{"tokenizer": {"type": 1}}', "\xff"])
def test_damaged_file_is_one_sentence(tmp_path: Path, content: str) -> None:
    """A check that cannot be made must not pass for one that was."""
    (tmp_path / "x.meta.json").write_bytes(content.encode("latin-1"))
    with expect_error(DataError, "x.meta.json") as caught:
        DatasetMetadata.read(str(tmp_path / "x"))
    assert "\n" not in str(caught.value)


def test_another_tokenizer_is_refused_naming_both() -> None:
    """The user sees what made the data, what the run has, and which flags decide."""
    metadata().check_tokenizer("x", GPT2)
    with pytest.raises(DataError) as caught:
        metadata().check_tokenizer("x", LLAMA)
    check_sentence(
        str(caught.value),
        "GPT2BPETokenizer",
        "50257",
        "HuggingFaceTokenizer",
        "32000",
        "--tokenizer-type",
        "tools/preprocess_data.py",
    )


def test_numbers_fit_any_data_and_unknown_data_fit_any_tokenizer() -> None:
    """NullTokenizer trains on ids that somebody else made; data of unknown origin can only be checked id by id."""
    metadata().check_tokenizer("x", NULL)
    metadata(None).check_tokenizer("x", LLAMA)


def test_ids_beyond_the_vocabulary_are_refused() -> None:
    """The largest id, known without reading the data, must have a row in the embedding."""
    metadata(max_token_id=31999).check_vocabulary("x", vocab_size=32000)
    metadata(max_token_id=None).check_vocabulary("x", vocab_size=1)
    with expect_error(DataError, "32000", "0", "31999"):
        metadata(max_token_id=32000).check_vocabulary("x", vocab_size=32000)


@pytest.mark.parametrize("counts", [(11, 3), (10, 4)])
def test_metadata_of_other_files_are_refused(counts: tuple[int, int]) -> None:
    """Somebody replaced .bin and .idx and left the old description beside them."""
    metadata().check_counts("x", num_tokens=10, num_sequences=3)
    with expect_error(DataError, "x.meta.json", "10 tokens", "3 sequences", "x.idx"):
        metadata().check_counts("x", num_tokens=counts[0], num_sequences=counts[1])


def test_every_value_replaced(tmp_path: Path) -> None:
    """Each ends in a sentence that names the file, or in metadata that can be compared."""
    whole = json.loads(metadata().to_json())
    whole |= {"sha256": {"bin": "a", "idx": "b"}, "chat": {"template": "x", "end_tokens": [1, 2]}}
    refused = 0
    for path, other in itertools.product(paths(whole), OTHERS):
        (tmp_path / "x.meta.json").write_text(json.dumps(replaced(whole, path, other)))
        try:
            found = DatasetMetadata.read(str(tmp_path / "x"))
            assert found is not None
            found.check_tokenizer("x", LLAMA)
            found.check_vocabulary("x", vocab_size=60000)
            found.check_content("x", ContentDigests("a", "b"))
        except DataError as error:
            refused += "x.meta.json" in str(error)
    assert refused > 80
