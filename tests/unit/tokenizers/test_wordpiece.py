"""BERT's WordPiece: ids of transformers' tokenizer, Megatron-LM's additions to the vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import BertTokenizer

from megatron.config.tokenizer import TokenizerConfig
from megatron.core.tokenizers.base import MaskingTokenizer
from megatron.core.tokenizers.build import build_tokenizer
from megatron.core.tokenizers.wordpiece import WordPieceTokenizer
from megatron.errors import ConfigError, DataError
from tests.harness.sentences import expect_error

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["the", "The", "cat", "##s", "café", "cafe", "##é", "un", "##aff", "##able", "!", ",", "漢", "[", "]", "mask"]
TEXTS = ["The cats, unaffable!", "cafés CAFÉ", "漢the", "  a\tthe\u0000 ", "", "xyzzy the", "the [MASK]"]


@pytest.fixture
def vocabulary(tmp_path: Path) -> str:
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(SPECIAL + WORDS) + "\n", encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(("kind", "lower"), [("BertWordPieceLowerCase", True), ("BertWordPieceCase", False)])
def test_ids_are_those_of_transformers(vocabulary: str, kind: str, lower: bool) -> None:
    """Weights of published BERT models mean these ids."""
    ours = build_tokenizer(TokenizerConfig(tokenizer_type=kind, vocab_file=vocabulary))  # type: ignore[arg-type]
    theirs = BertTokenizer(vocabulary, do_lower_case=lower)
    texts = [text for text in TEXTS if "[MASK]" not in text]
    assert ours.tokenize_batch(texts) == [theirs.encode(text, add_special_tokens=False) for text in texts]
    assert ours.name == kind


def test_special_tokens_in_a_text_are_characters(vocabulary: str) -> None:
    """A web page about BERT must not hide words from the model."""
    tokenizer = WordPieceTokenizer(vocabulary, name="BertWordPieceLowerCase", extra_ids=0)
    assert tokenizer.mask not in tokenizer.tokenize("the [MASK]")


def test_vocabulary_grows_as_megatrons(vocabulary: str) -> None:
    """The number of rows of the embeddings, and which of them are sentinels, follow from it."""
    tokenizer = WordPieceTokenizer(vocabulary, name="BertWordPieceCase", extra_ids=3)
    size = len(SPECIAL + WORDS)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.sentinels) == (size, size + 1, (size + 2, size + 3, size + 4))
    assert tokenizer.vocab_size == size + 5
    assert (tokenizer.pad, tokenizer.cls, tokenizer.sep, tokenizer.mask, tokenizer.eod) == (0, 2, 3, 4, 3)
    spelled = dict(zip(SPECIAL + WORDS, tokenizer.continuations()))
    assert [word for word, goes_on in spelled.items() if goes_on] == ["##s", "##é", "##aff", "##able"]
    masking: MaskingTokenizer = tokenizer
    assert len(masking.continuations()) == tokenizer.vocab_size


def test_a_t5_reads_data_made_without_sentinels(vocabulary: str) -> None:
    """Megatron-LM preprocesses without them, whatever the flags say; [BOS] and [EOS] do move ids of a run."""
    kinds = [(0, None), (100, None), (0, len(SPECIAL + WORDS))]
    without, sentinels, bare = (
        WordPieceTokenizer(vocabulary, name="BertWordPieceCase", extra_ids=extra, vocab_size=size)
        for extra, size in kinds
    )
    assert sentinels.fingerprint == without.fingerprint != bare.fingerprint


def test_text_comes_back(vocabulary: str) -> None:
    tokenizer = WordPieceTokenizer(vocabulary, name="BertWordPieceLowerCase", extra_ids=0)
    assert tokenizer.detokenize(tokenizer.tokenize("The cats, unaffable!")) == "the cats, unaffable!"


def test_wrong_files(tmp_path: Path, vocabulary: str) -> None:
    lacking = tmp_path / "lacking.txt"
    lacking.write_text("the\n[PAD]\n[UNK]\n")
    with expect_error(DataError, "WordPiece", "vocab.txt"):
        WordPieceTokenizer(str(lacking), name="x", extra_ids=0)
    gpt = tmp_path / "vocab.json"
    gpt.write_text('{"a": 0}')
    with expect_error(DataError, "vocab.json", "tokenizer.json", "WordPiece", "vocab.txt"):
        WordPieceTokenizer(str(gpt), name="x", extra_ids=0)
    with expect_error(ConfigError, "--vocab-file"):
        WordPieceTokenizer(None, name="x", extra_ids=0)
