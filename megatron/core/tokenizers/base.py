"""The interface of a tokenizer, and what the kinds of tokenizer share."""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from megatron.errors import ConfigError, DataError
from megatron.small_files import check_regular


class Tokenizer(Protocol):
    """Turns text into token ids in ``[0, vocab_size)`` and back.

    ``name``: Megatron's name of the kind, as given to ``--tokenizer-type``. ``vocab_size``: number of ids, added tokens
    included, before padding. ``eod``: id that ends a document; ``pad``: id that fills short samples; ``bos``, ``eos``:
    ids that begin and end a sequence; None where the vocabulary has none.
    """

    name: str
    vocab_size: int
    eod: int
    pad: int | None
    bos: int | None
    eos: int | None

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """SHA-256 (hex) of what determines which id stands for what: equal fingerprints mean interchangeable data."""

    def tokenize(self, text: str) -> list[int]:
        """Ids of one text; raises DataError for text that has none (see ``tokenize_batch``)."""
        return self.tokenize_batch([text])[0]

    @abstractmethod
    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of many texts, faster than one by one.

        Raises DataError when a text cannot be expressed: a lone surrogate, or a word that is no id for NullTokenizer.
        """

    def tokenize_parts(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text without those that some kinds put before or behind a whole text."""
        return self.tokenize_batch(texts)

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens included; ids beyond the vocabulary, which many models embed, have none."""

    def detokenize_part(self, ids: Sequence[int]) -> str:
        """Text of ids that others may follow: as ``detokenize``, but what follows changes nothing in it."""
        return self.detokenize(ids)

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to a text that has begun, as UTF-8: some are parts of characters, some add nothing."""
        return self.detokenize([token, token])[len(self.detokenize([token])) :].encode()

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that shape a text and are none of it, such as the one that ends documents."""
        return frozenset(found for found in (self.eod, self.pad, self.bos, self.eos) if found is not None)


class SpanTokenizer(Tokenizer, Protocol):
    """A tokenizer with sentinels, which stand for masked spans.

    ``sentinels``: ids of ``--vocab-extra-ids`` or of the vocabulary itself. ``decoder_start``: id that a decoder begins
    with, if there is one.
    """

    sentinels: tuple[int, ...]
    decoder_start: int | None

    @abstractmethod
    def continuations(self) -> Sequence[bool]:
        """Whether each id continues the previous word."""


class MaskingTokenizer(SpanTokenizer, Protocol):
    """A tokenizer with the ids that begin a sample (``cls``), end each part of it (``sep``) and mask a token.

    ``separators``: how many ``sep`` stand between two texts.
    """

    cls: int
    sep: int
    mask: int
    separators: int


def with_pieces(ids: Iterable[int], vocab_size: int) -> list[int]:
    """The ids that a vocabulary has; a model's embedding is often larger, and untrained rows may be sampled."""
    return [token for token in ids if 0 <= token < vocab_size]


def encoded_texts(texts: Iterable[str]) -> list[bytes]:
    """Each text as UTF-8; raises DataError for a lone surrogate, which JSON can spell but no vocabulary has."""
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
    check_regular(path, where=f"{flag} {value}", error=DataError)
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "is no regular file" if path.exists() else "does not exist"
        raise DataError(f"{flag} {value} {found}; {kind} needs the path of {holds}.")
    return path


def refuse_url(value: str, *, flag: str) -> None:
    """Raise DataError for a tokenizer in object storage."""
    if "://" in value:
        raise DataError(f"{flag} {value} is a URL; tokenizers are read from a disk: copy its files and name the copy")


def extra_id_tokens(count: int) -> list[str]:
    """The sentinel tokens that ``--vocab-extra-ids`` appends to a vocabulary."""
    return [f"<extra_id_{number}>" for number in range(count)]
