"""Names of tokenizers: each that exists is built under its name, each that doesn't says why."""

from __future__ import annotations

from typing import Any

from megatron.config.parse import parse_groups
from megatron.config.tokenizer import TokenizerConfig
from megatron.core.tokenizers.build import build_tokenizer
from megatron.errors import ConfigError
from tests.harness.sentences import expect_error


def test_name_is_the_flags_value() -> None:
    config = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=5)
    assert build_tokenizer(config).name == "NullTokenizer"


def test_unknown_kind_from_code() -> None:
    """A config built in code is not checked by the parser; it must still not fall through."""
    settings: dict[str, Any] = {"tokenizer_type": "WhateverTokenizer"}
    with expect_error(ConfigError, "--tokenizer-type"):
        build_tokenizer(TokenizerConfig(**settings))


def test_more_sentinels_than_a_machine_holds_are_refused() -> None:
    """4,000,000,000 of them took all memory, as each is a text in a list."""
    with expect_error(ConfigError, "--vocab-extra-ids", "4000000000", "1000000"):
        parse_groups(["--vocab-extra-ids", "4000000000"], TokenizerConfig, prog="x.py", about="")
