"""SentencePiece models: Megatron's three kinds differ in special tokens, so in ids and in what ends a document."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from megatron.config.tokenizer import TokenizerConfig
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.build import build_tokenizer
from megatron.errors import ConfigError, DataError
from tests.harness.sentences import expect_error
from tests.unit.tokenizers.conftest import TEXTS


def build(kind: str, model: Path | str | None, *, extra_ids: int = 0) -> Tokenizer:
    path = None if model is None else str(model)
    settings: dict[str, Any] = {"tokenizer_type": kind, "tokenizer_model": path, "vocab_extra_ids": extra_ids}
    return build_tokenizer(TokenizerConfig(**settings))


@pytest.fixture(scope="module")
def reference(sentencepiece_model: Path) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_model))


@pytest.fixture(scope="module")
def full(sentencepiece_model: Path) -> Tokenizer:
    return build("SentencePieceTokenizer", sentencepiece_model, extra_ids=2)


def test_gpt_kind_is_the_bare_model(sentencepiece_model: Path, reference: sentencepiece.SentencePieceProcessor) -> None:
    tokenizer = build("GPTSentencePieceTokenizer", sentencepiece_model)
    assert tokenizer.tokenize_batch(TEXTS) == [reference.encode(text, out_type=int) for text in TEXTS]
    assert tokenizer.vocab_size == reference.get_piece_size()
    assert (tokenizer.pad, tokenizer.bos, tokenizer.eos, tokenizer.eod) == (None, 1, 2, 2)
    assert tokenizer.detokenize(tokenizer.tokenize("the dog")) == "the dog"


def test_llama_kind_begins_with_bos(sentencepiece_model: Path, reference: sentencepiece.SentencePieceProcessor) -> None:
    tokenizer = build("Llama2Tokenizer", sentencepiece_model)
    assert tokenizer.tokenize(TEXTS[0]) == [1, *reference.encode(TEXTS[0], out_type=int)]
    assert tokenizer.name == "Llama2Tokenizer"
    assert tokenizer.fingerprint != build("GPTSentencePieceTokenizer", sentencepiece_model).fingerprint


def test_special_tokens_follow_the_model_in_megatrons_order(
    full: Tokenizer, reference: sentencepiece.SentencePieceProcessor
) -> None:
    """CLS, SEP, EOD, MASK, the pad that the model lacks, then the sentinels; begin and end are the model's own."""
    size = reference.get_piece_size()
    spelled = ["<CLS>", "<SEP>", "<EOD>", "<MASK>", "<PAD>", "<extra_id_0>", "<extra_id_1>"]
    assert [full.tokenize(token)[-1] for token in spelled] == list(range(size, size + 7))
    assert full.vocab_size == size + 7
    assert (full.eod, full.pad, full.bos, full.eos) == (size + 2, size + 4, 1, 2)


def test_a_t5_reads_data_made_without_sentinels(full: Tokenizer, sentencepiece_model: Path) -> None:
    assert build("SentencePieceTokenizer", sentencepiece_model).fingerprint == full.fingerprint


def test_text_around_special_tokens_is_encoded_by_itself(
    full: Tokenizer, reference: sentencepiece.SentencePieceProcessor
) -> None:
    size = reference.get_piece_size()
    expected = [*reference.encode("the dog ", out_type=int), size + 6, *reference.encode(" mind", out_type=int)]
    assert full.tokenize("the dog <extra_id_1> mind") == expected
    assert full.detokenize(expected) == "the dog<extra_id_1>mind"


def test_batch_equals_one_by_one(full: Tokenizer) -> None:
    texts = [TEXTS[0], "a<SEP>b", "", "<EOD>", *TEXTS]
    assert full.tokenize_batch(texts) == [full.tokenize(text) for text in texts]


def test_extra_ids_need_the_kind_that_adds_tokens(sentencepiece_model: Path) -> None:
    with expect_error(ConfigError, "--vocab-extra-ids 2", "GPTSentencePieceTokenizer"):
        build("GPTSentencePieceTokenizer", sentencepiece_model, extra_ids=2)


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "GPTSentencePieceTokenizer"])
def test_lone_surrogate_is_refused(sentencepiece_model: Path, kind: str) -> None:
    with expect_error(DataError, "surrogate"):
        build(kind, sentencepiece_model).tokenize_batch(["fine", "broken \ud800"])


def test_wrong_files_are_explained(tmp_path: Path) -> None:
    (tmp_path / "junk.model").write_text("not a model")
    with expect_error(DataError):
        build("SentencePieceTokenizer", tmp_path / "junk.model")
    with expect_error(DataError, "SentencePieceTokenizer", "SentencePiece"):
        build("SentencePieceTokenizer", tmp_path / "none.model")
    with expect_error(ConfigError, "--tokenizer-model"):
        build("SentencePieceTokenizer", None)


def test_missing_library_is_explained(sentencepiece_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is optional; whoever needs it learns its name."""
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with expect_error(ConfigError):
        build("SentencePieceTokenizer", sentencepiece_model)
