"""Names of tokenizers: each that exists is built under its name, each that doesn't says why."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.config.tokenizer import TokenizerConfig
from megatron.core.tokenizers import build_tokenizer
from megatron.errors import ConfigError


def test_name_is_the_flags_value() -> None:
    config = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=5)
    assert build_tokenizer(config).name == "NullTokenizer"


def test_unknown_kind_from_code() -> None:
    """A config built in code is not checked by the parser; it must still not fall through."""
    settings: dict[str, Any] = {"tokenizer_type": "WhateverTokenizer"}
    with pytest.raises(ConfigError, match="--tokenizer-type WhateverTokenizer is no tokenizer"):
        build_tokenizer(TokenizerConfig(**settings))
