"""Vocabularies in the JSON form of Megatron's TikTokenizer: a list of objects with rank, token_bytes and token_str."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from typing_extensions import override

from megatron.core.tokenizers.base import Tokenizer, encoded_texts, fingerprint_of, required_file, with_pieces
from megatron.errors import ConfigError, DataError
from megatron.small_files import VOCABULARY_BYTES, read_json

KIND = "TikTokenizer"
DEFAULT_VOCAB_SIZE = 2**17
REQUIRED_SPECIAL = ("<unk>", "<s>", "</s>")

# How a text is cut into words before BPE; ids depend on these, so they are part of the format.
_LOWER, _UPPER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}", r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


class TikTokenizer(Tokenizer):
    """Byte-level BPE by rank; ``num_special`` special tokens come first, then as many ranks as the vocabulary holds.

    ``special`` spells the first special tokens (``<unk> <s> </s>`` among them); the others are ``<SPECIAL_3>`` and so
    on. Special tokens that are spelled out in a text are ordinary characters. ``</s>`` ends documents.
    """

    name = KIND
    pad = None

    def __init__(
        self,
        tokenizer_model: str | None,
        *,
        pattern: str,
        vocab_size: int | None,
        num_special: int,
        special: Sequence[str],
    ) -> None:
        path = required_file(tokenizer_model, flag="--tokenizer-model", kind=KIND, holds="a vocabulary in JSON")
        names = _special_tokens(special or REQUIRED_SPECIAL, num_special)
        limit = DEFAULT_VOCAB_SIZE if vocab_size is None else vocab_size
        if limit < num_special + 256:
            raise ConfigError(
                f"--vocab-size {limit} is too small for --tiktoken-num-special-tokens {num_special} and the 256 bytes; "
                f"give at least {num_special + 256}."
            )
        tokens = _read_ranks(path)[: limit - num_special]
        if vocab_size is not None and len(tokens) < vocab_size - num_special:
            raise ConfigError(
                f"--vocab-size {vocab_size} is more than {path} and its special tokens hold: "
                f"{len(tokens)} + {num_special} = {len(tokens) + num_special}."
            )
        self._special = {token: number for number, token in enumerate(names)}
        self._ranks = {token: num_special + rank for rank, token in enumerate(tokens)}
        self._pattern = PATTERNS[pattern]
        self.vocab_size = num_special + len(tokens)
        self.bos, self.eos = self._special["<s>"], self._special["</s>"]
        self.eod = self.eos
        try:
            import tiktoken
        except ImportError:
            raise ConfigError(f"{KIND} needs the tiktoken library: pip install tiktoken.") from None
        self._encoding = tiktoken.Encoding(
            KIND, pat_str=self._pattern, mergeable_ranks=self._ranks, special_tokens=self._special
        )

    @cached_property
    @override
    def fingerprint(self) -> str:
        """SHA-256 of the pattern, the ranks and the special tokens."""
        ranks = {token.hex(): number for token, number in self._ranks.items()}
        return fingerprint_of([self._pattern, ranks, self._special])

    @override
    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of many texts."""
        encoded_texts(texts)  # refuses lone surrogates, which the library would replace silently
        return [self._encoding.encode_ordinary(text) for text in texts]

    @override
    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of the ids; bytes that end inside a character come back as U+FFFD."""
        return self._encoding.decode(with_pieces(ids, self.vocab_size))

    @override
    def token_bytes(self, token: int) -> bytes:
        """What a token adds to a text, as UTF-8."""
        return self._encoding.decode_single_token_bytes(token) if 0 <= token < self.vocab_size else b""

    @property
    @override
    def special_ids(self) -> frozenset[int]:
        """The special tokens."""
        return frozenset(self._special.values())


def _special_tokens(spelled: Sequence[str], count: int) -> list[str]:
    """All ``count`` special tokens: the spelled ones and fillers."""
    missing = [token for token in REQUIRED_SPECIAL if token not in spelled]
    if missing:
        raise ConfigError(f"--tiktoken-special-tokens lacks {' '.join(missing)}, which {KIND} needs; add them.")
    if len(spelled) > count:
        raise ConfigError(
            f"--tiktoken-num-special-tokens {count} is less than the {len(spelled)} special tokens {' '.join(spelled)}."
        )
    names = [*spelled, *(f"<SPECIAL_{number}>" for number in range(len(spelled), count))]
    repeated = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < count else []
    if repeated:
        raise ConfigError(f"--tiktoken-special-tokens repeats {' '.join(repeated)}; each token has one id.")
    return names


def _read_ranks(path: Path) -> list[bytes]:
    """The tokens in the order of their rank."""
    where = f"--tokenizer-model {path}"
    entries = read_json(path, list[Any], where=where, error=DataError, most_bytes=VOCABULARY_BYTES)
    tokens = []
    for rank, entry in enumerate(entries):
        if not isinstance(entry, dict) or entry.get("rank") != rank or not isinstance(entry.get("token_bytes"), str):
            wanted = f'an object {{"rank": {rank}, "token_bytes": base64, "token_str": text}}'
            raise DataError(f"{where}: entry {rank} must be {wanted}.")
        try:
            tokens.append(base64.b64decode(entry["token_bytes"], validate=True))
        except binascii.Error as error:
            raise DataError(f"{where}: token_bytes of entry {rank} is not base64: {error}.") from None
    if tokens[:256] != [bytes([value]) for value in range(256)]:
        raise DataError(f"{where}: ranks 0 to 255 must be the 256 single bytes in order.")
    if len(set(tokens)) != len(tokens):
        raise DataError(f"{where} holds the same token_bytes under two ranks.")
    return tokens
