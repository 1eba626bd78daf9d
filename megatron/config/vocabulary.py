"""How many words a tokenizer's files hold, counted without the tokenizer's library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron.config.run import RunConfig
from megatron.errors import ConfigError

_TIKTOKEN_DEFAULT_SIZE = 2**17
_OR_SAY_SO = "; to go on without it, give --vocab-size"


def vocabulary_size(run: RunConfig) -> int:
    """Size of the vocabulary before padding: as given, or counted in the tokenizer's files.

    Raises ConfigError in one sentence when a file is missing or its kind is not counted here.
    """
    if run.model.vocab_size is not None:
        return run.model.vocab_size
    tokenizer = run.tokenizer
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
            ranks = len(_read_json("--tokenizer-model", tokenizer.tokenizer_model))
            return min(ranks + tokenizer.tiktoken_num_special_tokens, _TIKTOKEN_DEFAULT_SIZE)
    raise ConfigError(f"the vocabulary of {tokenizer.tokenizer_type} is not counted without its library{_OR_SAY_SO}")


def _hugging_face_size(model: str | None) -> int:
    path = Path(model or "")
    file = path / "tokenizer.json" if path.is_dir() else path
    content = _read_json("--tokenizer-model", str(file))
    vocabulary = content.get("model", {}).get("vocab", {}) if isinstance(content, dict) else {}
    ids = vocabulary if isinstance(vocabulary, dict) else {str(number): number for number in range(len(vocabulary))}
    added = {str(token.get("content")): token.get("id") for token in content.get("added_tokens", ())} if ids else {}
    return _highest("--tokenizer-model", str(file), ids | added)


def _highest(flag: str, file: str | None, ids: Any) -> int:
    """Embeddings are looked up by id, so a vocabulary with holes is as large as its highest id says."""
    if not isinstance(ids, dict) or not ids or not all(isinstance(number, int) for number in ids.values()):
        raise ConfigError(f"{flag} {file} holds no vocabulary of words and their ids{_OR_SAY_SO}")
    return int(max(ids.values())) + 1


def _read(flag: str, file: str | None) -> bytes:
    try:
        return Path(file or "").read_bytes()
    except OSError as error:
        reason = error.strerror or "it cannot be read"
        raise ConfigError(f"{flag} {file} cannot be read ({reason.lower()}){_OR_SAY_SO}") from None


def _read_json(flag: str, file: str | None) -> Any:
    try:
        return json.loads(_read(flag, file))
    except ValueError:
        raise ConfigError(f"{flag} {file} is not JSON{_OR_SAY_SO}") from None
