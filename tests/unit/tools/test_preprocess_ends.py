"""What preprocessing puts before and behind documents, and what it says about that."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from tokenizers import processors

from megatron.core.tokenizers.huggingface import load
from megatron.errors import ConfigError
from tests.harness.sentences import expect_error
from tests.unit.tools.conftest import TEXTS, write_lines
from tests.unit.tools.test_preprocess_data import documents, preprocess


@pytest.fixture(scope="session")
def ending_folder(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer's folder with a post-processor that puts ``<|endoftext|>`` before and behind each text."""
    folder, end = tmp_path_factory.mktemp("ending"), "<|endoftext|>"
    pipeline = tokenizers.Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    around = [(end, pipeline.token_to_id(end))]
    pipeline.post_processor = processors.TemplateProcessing(f"{end} $A {end}", f"{end} $A $B {end}", around)
    pipeline.save(str(folder / "tokenizer.json"))
    return folder


def test_two_ends_of_a_document_are_said(
    tmp_path: Path, ending_folder: Path, tokenizer_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every document ended with two end marks, and an empty text became three, without a word."""
    source, end = write_lines(tmp_path / "in.jsonl", [{"text": text} for text in ("a", "", "b")]), "<|endoftext|>"
    flags = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer_folder))
    own = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(ending_folder))
    alone = f"an empty text becomes a document of {end * 2}"
    for more, expected in (
        (
            ["--append-eod"],
            f"note: documents end with {end} twice, the tokenizer's own and that of --append-eod (leave",
        ),
        (["--append-eod"], f"(leave it out for one); {alone}{end} alone\n"),
        ([], f"note: {alone} alone\n"),
    ):
        preprocess(source, tmp_path / "out", own, *more)
        said = capsys.readouterr().err
        assert expected in said
        assert said.count("note:") == 1
    for settings in (flags, (*own, "--tokenizer-hf-no-include-special-tokens")):
        preprocess(source, tmp_path / "out", settings, "--append-eod")
        assert "note:" not in capsys.readouterr().err


def test_tokens_around_texts_are_left_out_as_asked(
    tmp_path: Path, corpus: Path, ending_folder: Path, tokenizer_folder: Path
) -> None:
    """--tokenizer-hf-no-include-special-tokens was an unknown flag."""
    flag = "--tokenizer-hf-no-include-special-tokens"
    tokenizer = load(str(tokenizer_folder), extra_ids=0)
    kind = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(ending_folder))
    preprocess(corpus, tmp_path / "out", kind, flag, "--append-eod")
    assert documents(tmp_path / "out") == [[*tokenizer.tokenize(text), tokenizer.eod] for text in TEXTS]
    with expect_error(ConfigError, flag, "GPT2BPETokenizer"):
        preprocess(corpus, tmp_path / "out", ("--vocab-file", "v", "--merge-file", "m"), flag)
