"""Texts in which ``[MASK]`` stands where the model fills in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from megatron.config.model import ModelConfig
from megatron.errors import ConfigError

if TYPE_CHECKING:  # texts are checked before anything heavy is imported
    from megatron.core.tokenizers.base import Tokenizer

MASK = "[MASK]"


def check_masks(texts: Iterable[str]) -> None:
    """Raise ConfigError for a text of ``--text`` without a mask."""
    for text in texts:
        if MASK not in text:
            raise ConfigError(f"--text {text!r} has no {MASK}: write it where words are missing")


def around_masks(text: str, tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids before, between and after the masks: one list more than there are masks."""
    return tokenizer.tokenize_parts(text.split(MASK))


def check_length(text: str, tokens: Sequence[int], config: ModelConfig) -> None:
    """Raise ConfigError for more tokens than the model has positions."""
    longest = config.max_position_embeddings
    if len(tokens) > longest:
        raise ConfigError(
            f"--text {text[:40]!r}... has {len(tokens)} tokens, and this model sees {longest} at most: shorten it"
        )
