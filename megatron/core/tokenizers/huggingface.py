"""A tokenizer in the form Hugging Face publishes: a tokenizer.json, alone or in a folder. Nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from megatron.core.tokenizers.rust import RustTokenizer
from megatron.errors import ConfigError, DataError

KIND = "HuggingFaceTokenizer"
KNOWN_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")


def load(tokenizer_model: str | None, *, extra_ids: int) -> RustTokenizer:
    """Ids as the tokenizer's own pipeline computes them, with the tokens its post-processor adds.

    The roles of special tokens come from the tokenizer_config.json or special_tokens_map.json beside it.
    Raises ConfigError when the flag is missing, DataError when the files are missing or are something else.
    """
    path = _find(tokenizer_model)
    try:
        pipeline = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise DataError(f"--tokenizer-model {path} is not a tokenizer.json: {error}.") from None
    roles = special_tokens(path.parent)

    def token_id(role: str, fallbacks: Sequence[str] = ()) -> int | None:
        names = [roles[role]] if role in roles else fallbacks
        return next((found for name in names if (found := pipeline.token_to_id(name)) is not None), None)

    eos = token_id("eos_token", KNOWN_ENDS)
    if eos is None:
        named = (
            f"eos_token {roles['eos_token']!r} is not one of its tokens" if "eos_token" in roles else "none is named"
        )
        raise DataError(
            f"--tokenizer-model {path} needs a token that ends documents, but {named}: give one of its tokens as "
            f'"eos_token" in {path.with_name("tokenizer_config.json")}.'
        )
    pad, bos = token_id("pad_token"), token_id("bos_token")
    return RustTokenizer(pipeline, name=KIND, eod=eos, pad=pad, bos=bos, eos=eos, extra_ids=extra_ids)


def _find(tokenizer_model: str | None) -> Path:
    """The tokenizer.json that the flag means."""
    if tokenizer_model is None:
        raise ConfigError(f"{KIND} needs --tokenizer-model: the path of a tokenizer.json or of its folder.")
    path = Path(tokenizer_model)
    if path.is_file():
        return path
    if not path.is_dir():
        raise DataError(
            f"--tokenizer-model {tokenizer_model} does not exist, and nothing is downloaded from the Hugging Face hub: "
            "fetch it (hf download NAME --local-dir FOLDER) and give the folder."
        )
    if (path / "tokenizer.json").is_file():
        return path / "tokenizer.json"
    if (path / "tokenizer.model").is_file():
        advice = f"GPTSentencePieceTokenizer --tokenizer-model {path / 'tokenizer.model'}"
    elif (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
        advice = f"GPT2BPETokenizer --vocab-file {path / 'vocab.json'} --merge-file {path / 'merges.txt'}"
    else:
        raise DataError(f"--tokenizer-model {path} holds no tokenizer.json; give a folder or file of a fast tokenizer.")
    raise DataError(f"--tokenizer-model {path} holds no tokenizer.json; use --tokenizer-type {advice}.")


def special_tokens(folder: Path) -> dict[str, str]:
    """Role -> spelling, e.g. ``eos_token`` -> ``</s>``; tokenizer_config.json has the last word."""
    roles: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            settings = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(f"{path} is not JSON: {error}.") from None
        if not isinstance(settings, dict):
            raise DataError(f"{path} holds {type(settings).__name__}, not a JSON object of settings.")
        roles.update({role: word for role, value in settings.items() if (word := _spelling(value)) is not None})
    return roles


def _spelling(value: Any) -> str | None:
    """A token is written as its text, or as an object with the text under ``content``."""
    word = value.get("content") if isinstance(value, dict) else value
    return word if isinstance(word, str) else None
