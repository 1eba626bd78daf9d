"""Vocabulary size of a tokenizer, counted in its files or by building it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.config.run import RunConfig
from megatron.config.tokenizer import TokenizerConfig
from megatron.errors import ConfigError, MegatronError
from megatron.small_files import VOCABULARY_BYTES, check_kinds, parse_json, read_bytes

_TIKTOKEN_DEFAULT_SIZE = 2**17
# Kinds whose size several files decide, or files that only their library reads.
_BUILT = ("HuggingFaceTokenizer", "SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
_OR_SAY_SO = "; it is not needed with --vocab-size"


def vocabulary_size(run: RunConfig, built: Callable[[TokenizerConfig], int] | None = None) -> int:
    """Size of the vocabulary before padding: as given, or of the tokenizer in its files.

    ``built``: counts by building a tokenizer whose files together decide. Without it the
    vocabulary's own file is counted. Raises ConfigError when one is missing or can only be counted by building.
    """
    if run.model.vocab_size is not None:
        return run.model.vocab_size
    tokenizer = run.tokenizer
    if built is not None and tokenizer.tokenizer_type in _BUILT:
        try:
            return built(tokenizer)
        except MegatronError as error:
            raise ConfigError(f"{str(error).rstrip('.')}{_OR_SAY_SO}") from None
    match tokenizer.tokenizer_type:
        case "GPT2BPETokenizer":
            words = _read_json("--vocab-file", tokenizer.vocab_file)
            return _highest("--vocab-file", tokenizer.vocab_file, words) + tokenizer.vocab_extra_ids
        case "BertWordPieceLowerCase" | "BertWordPieceCase":
            pieces = _read("--vocab-file", tokenizer.vocab_file).decode(errors="replace").rstrip("\n").split("\n")
            return len(pieces) + len({"[BOS]", "[EOS]"} - set(pieces)) + tokenizer.vocab_extra_ids
        case "HuggingFaceTokenizer":
            return _hugging_face_size(tokenizer.tokenizer_model) + tokenizer.vocab_extra_ids
        case "TikTokenizer":
            ranks = _read_json("--tokenizer-model", tokenizer.tokenizer_model, list[Any])
            return min(len(ranks) + tokenizer.tiktoken_num_special_tokens, _TIKTOKEN_DEFAULT_SIZE)
    raise ConfigError(f"the vocabulary of {tokenizer.tokenizer_type} cannot be counted without its library{_OR_SAY_SO}")


def _hugging_face_size(model: str | None) -> int:
    path = Path(model or "")
    file = path / "tokenizer.json" if path.is_dir() else path
    content = _read_json("--tokenizer-model", str(file), dict[str, Any])
    kinds = {"model": dict[str, Any], "added_tokens": list[dict[str, Any]]}
    check_kinds(content, kinds, where=f"--tokenizer-model {file}", error=ConfigError)
    vocabulary = (content.get("model") or {}).get("vocab") or {}
    ids = dict(enumerate(range(len(vocabulary)))) if isinstance(vocabulary, list) else vocabulary
    added = {str(token.get("content")): token.get("id") for token in content.get("added_tokens") or ()}
    return _highest("--tokenizer-model", str(file), {**ids, **added} if isinstance(ids, dict) and ids else {})


def _highest(flag: str, file: str | None, ids: Any) -> int:
    """The highest id plus one: embeddings are indexed by id, so unused ids count."""
    if not isinstance(ids, dict) or not ids or not all(type(number) is int for number in ids.values()):
        raise ConfigError(f"{flag} {file} holds no vocabulary of words and their ids{_OR_SAY_SO}")
    return int(max(ids.values())) + 1


def _read(flag: str, file: str | None) -> bytes:
    try:
        return read_bytes(Path(file or ""), where=f"{flag} {file}", error=ConfigError, most_bytes=VOCABULARY_BYTES)
    except OSError as error:
        reason = error.strerror or "it cannot be read"
        raise ConfigError(f"{flag} {file} cannot be read ({reason.lower()}){_OR_SAY_SO}") from None


def _read_json(flag: str, file: str | None, kind: Any = Any) -> Any:
    return parse_json(_read(flag, file), kind, where=f"{flag} {file}", error=ConfigError)
