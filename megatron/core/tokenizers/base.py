"""What the rest of the program knows about a tokenizer, and what the kinds of tokenizer share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from megatron.errors import ConfigError, DataError


class Tokenizer(Protocol):
    """Turns text into token ids and back; ids lie in ``[0, vocab_size)``."""

    @property
    def name(self) -> str:
        """Megatron's name of the kind, as given to ``--tokenizer-type``."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included, before padding."""

    @property
    def eod(self) -> int:
        """The id that ends a document."""

    @property
    def pad(self) -> int | None:
        """The id that fills short samples, None when the vocabulary has none."""

    @property
    def bos(self) -> int | None:
        """The id that begins a sequence, None when the vocabulary has none."""

    @property
    def eos(self) -> int | None:
        """The id that ends a sequence, None when the vocabulary has none."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of what decides which id stands for what: equal fingerprints mean interchangeable data."""

    def tokenize(self, text: str) -> list[int]:
        """Ids of one text; raises DataError for text that has none (see ``tokenize_batch``)."""

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of many texts, faster than one by one.

        Raises DataError when a text cannot be expressed: a lone surrogate, or a word that is no id for NullTokenizer.
        """

    def tokenize_parts(self, texts: Sequence[str]) -> list[list[int]]:
        """As ``tokenize_batch``, without ids that some kinds put before or behind a whole text."""

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens included."""


class SpanTokenizer(Tokenizer, Protocol):
    """A tokenizer with sentinels, which stand for masked spans."""

    @property
    def sentinels(self) -> tuple[int, ...]:
        """The ids that stand for hidden spans, ``--vocab-extra-ids`` of them or the vocabulary's own."""

    @property
    def decoder_start(self) -> int | None:
        """The id that a decoder begins with."""

    def continuations(self) -> Sequence[bool]:
        """For each id whether it goes on with the word before."""


class MaskingTokenizer(SpanTokenizer, Protocol):
    """A tokenizer with tokens that begin, separate and mask texts."""

    @property
    def cls(self) -> int:
        """The id that begins a sample."""

    @property
    def sep(self) -> int:
        """The id that ends each part of a sample."""

    @property
    def mask(self) -> int:
        """The id that hides another."""


def check_encodable(texts: Iterable[str]) -> None:
    """Raise DataError when a text holds half of a surrogate pair, which JSON can spell but no vocabulary knows."""
    encoded_texts(texts)


def encoded_texts(texts: Iterable[str]) -> list[bytes]:
    """Each text as UTF-8; raises DataError for half of a surrogate pair."""
    try:
        return [text.encode() for text in texts]
    except UnicodeEncodeError as error:
        half = ord(error.object[error.start])
        raise DataError(rf"the text holds \u{half:04x}, an unpaired surrogate, which is not a character") from None


def fingerprint_of(parts: Any) -> str:
    """SHA-256 (hex) of a JSON value, independent of the order of keys."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def required_file(value: str | None, *, flag: str, kind: str, holds: str) -> Path:
    """The file a tokenizer is read from.

    Raises ConfigError when the flag is not given, DataError when there is no such file.
    """
    if value is None:
        raise ConfigError(f"{kind} needs {flag}: the path of {holds}.")
    refuse_url(value, flag=flag)
    path = Path(value)
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "does not exist"
        raise DataError(f"{flag} {value} {found}; {kind} needs the path of {holds}.")
    return path


def refuse_url(value: str, *, flag: str) -> None:
    """Raise DataError for a tokenizer in object storage."""
    if "://" in value:
        raise DataError(f"{flag} {value} is a URL; tokenizers are read from a disk: copy its files and name the copy")


def no_extra_ids(extra_ids: int, *, kind: str) -> None:
    """Refuse ``--vocab-extra-ids`` for a tokenizer that cannot add tokens; raises ConfigError."""
    if extra_ids:
        raise ConfigError(
            f"--vocab-extra-ids {extra_ids} has no effect with {kind}; leave it out, or use GPT2BPETokenizer, "
            "HuggingFaceTokenizer or SentencePieceTokenizer."
        )


def extra_id_tokens(count: int) -> list[str]:
    """The sentinel tokens that ``--vocab-extra-ids`` appends to a vocabulary."""
    return [f"<extra_id_{number}>" for number in range(count)]
