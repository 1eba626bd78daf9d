"""A tokenizer of the Rust library ``tokenizers``, which encodes a batch without holding Python's lock."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import tokenizers
from tokenizers import decoders
from typing_extensions import override

from megatron.core.tokenizers.base import Tokenizer, encoded_texts, extra_id_tokens, fingerprint_of, with_pieces
from megatron.errors import DataError

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
# GPT-2 writes printable bytes of Latin-1 as themselves and the others as characters from 256 on, in order.
_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_OTHERS = [value for value in range(256) if value not in _PRINTABLE]
_BYTES = {chr(value): value for value in _PRINTABLE} | {chr(256 + n): value for n, value in enumerate(_OTHERS)}
BYTE_CHARACTERS = {value: character for character, value in _BYTES.items()}
"""How byte-level vocabularies spell each byte."""
MOST_HOLES = 100_000
"""Ids without a token that a vocabulary may have; real ones have a few."""


class RustTokenizer(Tokenizer):
    """Normalizer, pre-tokenizer, model and post-processor as one pipeline.

    ``--vocab-extra-ids`` appends ``<extra_id_0>``, ... to the vocabulary. ``written``: another description of the same
    tokenizer, which its fingerprint is made of.
    """

    def __init__(
        self,
        pipeline: tokenizers.Tokenizer,
        *,
        name: str,
        eod: int,
        pad: int | None,
        bos: int | None,
        eos: int | None,
        extra_ids: int = 0,
        written: tokenizers.Tokenizer | None = None,
    ) -> None:
        vocabulary = pipeline.get_vocab(with_added_tokens=True)
        # With ids so far apart, lists by id, the library's own among them, would take all memory.
        token = max(vocabulary, key=vocabulary.__getitem__, default="")
        if vocabulary and vocabulary[token] > MOST_HOLES + 10 * len(vocabulary):
            raise DataError(
                f"the vocabulary of {name} gives {token[:40]!r} the id {vocabulary[token]}, but has {len(vocabulary)} "
                "tokens: the file is damaged, since ids must be smaller than the number of tokens"
            )
        pipeline.no_truncation()  # a tokenizer.json may carry settings that cut or fill documents
        pipeline.no_padding()
        self._appended = [token for token in extra_id_tokens(extra_ids) if pipeline.token_to_id(token) is None]
        pipeline.add_special_tokens(self._appended)
        self.name, self.eod, self.pad, self.bos, self.eos = name, eod, pad, bos, eos
        self.pipeline, self._written = pipeline, written or pipeline
        # Not the number of tokens: some vocabularies have holes, and embeddings are looked up by id.
        self.vocab_size = max(pipeline.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    @override
    def fingerprint(self) -> str:
        """SHA-256 of the vocabulary, the merges and how text is cut.

        It doesn't depend on whether special tokens that a text spells out are recognised, which changes the meaning of
        no id: vocab.json with merges.txt and the tokenizer.json of the same training have one fingerprint. Nor does it
        depend on sentinels that ``--vocab-extra-ids`` appends: data preprocessed without them can be read.
        """
        spec = json.loads(self._written.to_str())
        parts = {part: _essence(spec[part]) for part in ("normalizer", "pre_tokenizer", "post_processor", "model")}
        if self._written.num_special_tokens_to_add(is_pair=False) == 0:  # it only adjusts character offsets
            parts["post_processor"] = None
        vocabulary = self.pipeline.get_vocab(with_added_tokens=True)
        for token in self._appended:
            del vocabulary[token]
        return fingerprint_of({**parts, "vocab": vocabulary})

    @override
    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of many texts; the library runs threads when ``TOKENIZERS_PARALLELISM`` allows."""
        return self._encode(texts, whole=True)

    @override
    def tokenize_parts(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of many texts, without those that the post-processor adds."""
        return self._encode(texts, whole=False)

    def _encode(self, texts: Sequence[str], *, whole: bool) -> list[list[int]]:
        try:
            found = self.pipeline.encode_batch_fast(list(texts), add_special_tokens=whole)
            return [encoding.ids for encoding in found]
        except TypeError:  # the library's error for a lone surrogate
            encoded_texts(texts)
            raise
        except Exception as error:  # a vocabulary that cannot spell a word and has no unknown token
            raise DataError(f"{self.name} cannot encode a text: {error}") from None

    @override
    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens included."""
        return self.pipeline.decode(with_pieces(ids, self.vocab_size), skip_special_tokens=False)

    @override
    def token_bytes(self, token: int) -> bytes:
        """What a token adds to a text that has begun, as UTF-8."""
        piece = (self.pipeline.id_to_token(token) if 0 <= token < self.vocab_size else None) or ""
        if self._is_byte_level:
            if all(character in _BYTES for character in piece):
                return bytes(_BYTES[character] for character in piece)
            return piece.encode()  # an added token
        if self._has_byte_fallback and (found := _BYTE_PIECE.fullmatch(piece)):
            return bytes.fromhex(found[1])
        return super().token_bytes(token)

    @cached_property
    @override
    def special_ids(self) -> frozenset[int]:
        """Ids that shape a text and are none of it: those with a role, and added tokens that are special."""
        added = self.pipeline.get_added_tokens_decoder().items()
        return super().special_ids.union(number for number, token in added if token.special)

    @cached_property
    def _is_byte_level(self) -> bool:
        return isinstance(self.pipeline.decoder, decoders.ByteLevel)

    @cached_property
    def _has_byte_fallback(self) -> bool:
        return "ByteFallback" in str(self.pipeline.decoder)


def _essence(value: Any) -> Any:
    """A part of the library's description without settings that don't affect ids.

    Settings that are off are dropped, so that a release of the library that describes new ones changes no fingerprint.
    """
    if isinstance(value, dict):
        kept = {key: _essence(item) for key, item in value.items() if key != "trim_offsets"}
        return {key: item for key, item in kept.items() if item is not None and item is not False and item != ""}
    return value
