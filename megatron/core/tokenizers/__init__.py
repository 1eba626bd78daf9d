"""Text to token ids: one protocol, one file for each kind of tokenizer."""

from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.build import build_tokenizer

__all__ = ["Tokenizer", "build_tokenizer"]
