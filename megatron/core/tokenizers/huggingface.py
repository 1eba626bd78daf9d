"""A tokenizer in the form Hugging Face publishes: a tokenizer.json, alone or in a folder. Nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import tokenizers

from megatron.core.tokenizers.base import extra_id_tokens, refuse_url
from megatron.core.tokenizers.rust import RustTokenizer
from megatron.errors import ConfigError, DataError
from megatron.small_files import read_json

KIND = "HuggingFaceTokenizer"
_SPACES = ("\u2581", "\u0120")  # the space before a word, in SentencePiece's models and in byte-level BPE
KNOWN_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")


class HuggingFaceTokenizer(RustTokenizer):
    """The pipeline of a tokenizer.json, and the ids of its vocabulary for masked samples.

    ``cls``, ``sep`` and ``mask`` exist where all three are named. Its own ``<extra_id_N>`` are sentinels as well as
    those of ``--vocab-extra-ids``. A decoder begins with ``bos``, or with padding where there is none.
    """

    cls: int
    sep: int
    mask: int
    separators: int

    def __init__(
        self, pipeline: tokenizers.Tokenizer, *, roles: Mapping[str, int], eod: int, bos: int | None, extra_ids: int
    ) -> None:
        pad = roles.get("pad_token")
        super().__init__(pipeline, name=KIND, eod=eod, pad=pad, bos=bos, eos=eod, extra_ids=extra_ids)
        self.decoder_start = pad if bos is None else bos
        if roles.keys() >= {"cls_token", "sep_token", "mask_token"}:
            self.cls, self.sep, self.mask = (roles[f"{name}_token"] for name in ("cls", "sep", "mask"))
            self.separators = max(pipeline.num_special_tokens_to_add(is_pair=True) - 2, 1)  # RoBERTa has two
        own = pipeline.get_vocab(with_added_tokens=True)
        mark = "" if extra_id_tokens(1)[0] in own else _SPACES[0]  # mT5's are spelled with a space before
        names = takewhile(own.__contains__, (f"{mark}{name}" for name in extra_id_tokens(len(own))))
        self.sentinels = tuple(own[name] for name in names)

    def continuations(self) -> Sequence[bool]:
        """For each id whether it continues the previous word, judged by its spelling; added tokens never do."""
        own = self.pipeline.get_vocab(with_added_tokens=False)
        added = self.pipeline.get_added_tokens_decoder()
        prefix = json.loads(self.pipeline.to_str())["model"].get("continuing_subword_prefix")
        space = next((mark for mark in _SPACES if any(piece.startswith(mark) for piece in own)), None)
        found = [False] * self.vocab_size
        for piece, number in own.items():
            if number not in added:
                found[number] = piece.startswith(prefix) if prefix else space is not None and piece[0] != space
        return found


def load(tokenizer_model: str | None, *, extra_ids: int) -> HuggingFaceTokenizer:
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
    if eos is None and "eos_token" not in roles:  # [SEP] ends documents as it ends texts
        eos = token_id("sep_token")
    if eos is None:
        named = (
            f"eos_token {roles['eos_token']!r} is not one of its tokens" if "eos_token" in roles else "none is named"
        )
        raise DataError(
            f"--tokenizer-model {path} needs a token that ends documents, but {named}: give one of its tokens as "
            f'"eos_token" in {path.with_name("tokenizer_config.json")}.'
        )
    known = {role: number for role in roles if (number := token_id(role)) is not None}
    return HuggingFaceTokenizer(pipeline, roles=known, eod=eos, bos=known.get("bos_token"), extra_ids=extra_ids)


def _find(tokenizer_model: str | None) -> Path:
    """The tokenizer.json that the flag names."""
    if tokenizer_model is None:
        raise ConfigError(f"{KIND} needs --tokenizer-model: the path of a tokenizer.json or of its folder.")
    refuse_url(tokenizer_model, flag="--tokenizer-model")
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
    """Role -> spelling, e.g. ``eos_token`` -> ``</s>``; tokenizer_config.json takes precedence."""
    roles: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = folder / name
        if not path.is_file():
            continue
        for role, value in read_json(path, dict[str, Any], error=DataError).items():
            word = value.get("content") if isinstance(value, dict) else value
            if isinstance(word, str):
                roles[role] = word
    return roles
