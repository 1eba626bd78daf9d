"""NullTokenizer: text that already is ids."""

from __future__ import annotations

import pytest

from megatron.config.tokenizer import TokenizerConfig
from megatron.core.tokenizers.build import build_tokenizer
from megatron.core.tokenizers.null import NullTokenizer
from megatron.errors import ConfigError, DataError


@pytest.fixture
def null() -> NullTokenizer:
    return NullTokenizer(100)


def test_ids_pass_through(null: NullTokenizer) -> None:
    assert null.tokenize_batch(["1 2 99", "", " 7\n"]) == [[1, 2, 99], [], [7]]
    assert null.detokenize([1, 2, 99]) == "1 2 99"


def test_end_of_document_is_one_more_id(null: NullTokenizer) -> None:
    """Megatron's arithmetic: --vocab-size counts the ids of the data, the tokenizer has one more."""
    assert (null.eod, null.vocab_size, null.pad) == (100, 101, None)
    assert null.tokenize("100") == [100]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 two 3", "'two' is not a token id"),
        ("1 2.5", "'2.5' is not a token id"),
        ("5 101", "token id 101 is outside 0 to 100"),
        ("-1 5", "'-1' is not a token id"),
        ("1 " + "9" * 5000, "is not a token id"),
        ("1 1_0", "'1_0' is not a token id"),
        ("1 +5", r"'\+5' is not a token id"),
        ("12345 \u0663\u0664", "'\u0663\u0664' is not a token id"),
        ("1 \u00b2", "'\u00b2' is not a token id"),
    ],
)
def test_what_is_no_id_is_named(null: NullTokenizer, text: str, message: str) -> None:
    """``1_0`` was read as 10, and digits of any script as theirs: text that isn't ids became other ids silently."""
    with pytest.raises(DataError, match=message):
        null.tokenize(text)


def test_vocab_size_is_required() -> None:
    with pytest.raises(ConfigError, match="NullTokenizer needs --vocab-size"):
        build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer"))


def test_extra_ids_are_refused() -> None:
    with pytest.raises(ConfigError, match="no effect with NullTokenizer"):
        build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_extra_ids=1, vocab_size=10))


def test_fingerprint_depends_on_the_size() -> None:
    assert NullTokenizer(100).fingerprint != NullTokenizer(101).fingerprint
