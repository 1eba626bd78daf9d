"""NullTokenizer: text that already is ids."""

from __future__ import annotations

import pytest

from megatron.config.tokenizer import TokenizerConfig
from megatron.core.tokenizers.build import build_tokenizer
from megatron.core.tokenizers.null import NullTokenizer
from megatron.errors import ConfigError, DataError
from tests.harness.sentences import expect_error


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
    "text",
    [
        "1 two 3",
        "1 2.5",
        "5 101",
        "-1 5",
        "1 " + "9" * 5000,
        "1 1_0",
        "1 +5",
        "12345 \u0663\u0664",
        "1 \u00b2",
    ],
)
def test_what_is_no_id_is_named(null: NullTokenizer, text: str) -> None:
    """``1_0`` was read as 10, and digits of any script as theirs: text that isn't ids became other ids silently."""
    with expect_error(DataError):
        null.tokenize(text)


def test_vocab_size_is_required() -> None:
    with expect_error(ConfigError, "--vocab-size"):
        build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer"))


def test_extra_ids_are_refused() -> None:
    with expect_error(ConfigError):
        build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_extra_ids=1, vocab_size=10))


def test_fingerprint_depends_on_the_size() -> None:
    assert NullTokenizer(100).fingerprint != NullTokenizer(101).fingerprint
