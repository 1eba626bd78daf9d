"""The tokenizer that the flags ask for."""

from __future__ import annotations

from megatron.config.tokenizer import TokenizerConfig
from megatron.core.tokenizers import gpt2_bpe, huggingface
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.null import NullTokenizer
from megatron.core.tokenizers.sentencepiece import PlainSentencePiece, SentencePieceTokenizer
from megatron.core.tokenizers.tiktoken import TikTokenizer
from megatron.core.tokenizers.wordpiece import WordPieceTokenizer
from megatron.errors import ConfigError, read_errors

_FIXED_VOCABULARIES = ("GPTSentencePieceTokenizer", "Llama2Tokenizer", "TikTokenizer", "NullTokenizer")


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer that ``--tokenizer-type`` and its files describe.

    Raises ConfigError for flags that are missing or have no effect, DataError for files that are missing or damaged.
    """
    kind, model, extra_ids = config.tokenizer_type, config.tokenizer_model, config.vocab_extra_ids
    if extra_ids and kind in _FIXED_VOCABULARIES:
        raise ConfigError(
            f"--vocab-extra-ids {extra_ids} has no effect with {kind}; leave it out, or use GPT2BPETokenizer, "
            "HuggingFaceTokenizer or SentencePieceTokenizer."
        )
    if config.tokenizer_hf_no_include_special_tokens and kind != "HuggingFaceTokenizer":
        raise ConfigError(
            f"--tokenizer-hf-no-include-special-tokens has no effect with {kind}; leave it out, or use "
            "HuggingFaceTokenizer."
        )
    with read_errors(model or config.vocab_file):
        match kind:
            case "GPT2BPETokenizer":
                return gpt2_bpe.load(config.vocab_file, config.merge_file, extra_ids=extra_ids)
            case "BertWordPieceLowerCase" | "BertWordPieceCase":
                return WordPieceTokenizer(
                    config.vocab_file, name=kind, extra_ids=extra_ids, vocab_size=config.vocab_size
                )
            case "HuggingFaceTokenizer":
                adds_tokens = not config.tokenizer_hf_no_include_special_tokens
                return huggingface.load(model, extra_ids=extra_ids, adds_tokens=adds_tokens)
            case "SentencePieceTokenizer":
                return SentencePieceTokenizer(model, extra_ids=extra_ids)
            case "GPTSentencePieceTokenizer" | "Llama2Tokenizer":
                return PlainSentencePiece(model, name=kind, begin=kind == "Llama2Tokenizer")
            case "TikTokenizer":
                return TikTokenizer(
                    model,
                    pattern=config.tiktoken_pattern or "v2",
                    vocab_size=config.vocab_size,
                    num_special=config.tiktoken_num_special_tokens,
                    special=config.tiktoken_special_tokens,
                )
            case "NullTokenizer":
                return NullTokenizer(config.vocab_size)
    raise ConfigError(f"--tokenizer-type {kind} is not a tokenizer of this project; --help lists them.")


def built_size(config: TokenizerConfig) -> int:
    """Number of ids of the tokenizer before padding; raises as ``build_tokenizer``."""
    return build_tokenizer(config).vocab_size
