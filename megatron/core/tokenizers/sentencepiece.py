"""SentencePiece models, with the special tokens of each of Megatron's three ways to use them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from typing_extensions import override

from megatron.core.tokenizers.base import (
    Tokenizer,
    encoded_texts,
    extra_id_tokens,
    fingerprint_of,
    required_file,
    with_pieces,
)
from megatron.errors import ConfigError, DataError

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

_SPACE = "\u2581"  # how the library spells a space inside pieces


class PlainSentencePiece(Tokenizer):
    """The model's own vocabulary: GPTSentencePieceTokenizer, and Llama2Tokenizer, which begins texts with BOS."""

    def __init__(self, tokenizer_model: str | None, *, name: str, begin: bool) -> None:
        self.name, self._begin = name, begin
        self._model = _load(tokenizer_model, name)
        self.vocab_size = self._model.get_piece_size()
        self.pad, self.bos, eos = _own_ids(self._model)
        if eos is None:
            raise DataError(f"--tokenizer-model {tokenizer_model} has no end-of-sentence piece, which {name} needs.")
        if begin and self.bos is None:
            raise DataError(f"--tokenizer-model {tokenizer_model} has no begin-of-sentence piece, which {name} needs.")
        self.eod = self.eos = eos

    @cached_property
    @override
    def fingerprint(self) -> str:
        """SHA-256 of the model and of whether texts begin with BOS."""
        return fingerprint_of([_digest(self._model), self._begin])

    @override
    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of many texts."""
        return _encode(self._model, texts, begin=self._begin)

    @override
    def tokenize_parts(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of many texts, without BOS."""
        return _encode(self._model, texts)

    @override
    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of the ids."""
        return str(self._model.decode(with_pieces(ids, self.vocab_size)))

    @override
    def token_bytes(self, token: int) -> bytes:
        """What a token adds to a text that has begun, as UTF-8."""
        return _piece_bytes(self._model, token)


class SentencePieceTokenizer(Tokenizer):
    """The model's vocabulary and special tokens appended to it, which are recognised when a text spells them out.

    Appended in this order unless the model has them: ``<CLS> <SEP> <EOD> <MASK>``, pad, begin and end of sentence, then
    ``--vocab-extra-ids`` sentinels.
    """

    name = "SentencePieceTokenizer"

    def __init__(self, tokenizer_model: str | None, *, extra_ids: int) -> None:
        self._model = _load(tokenizer_model, self.name)
        known = {self._model.id_to_piece(each): each for each in range(self._model.get_piece_size())}
        roles = [
            role if found is None else self._model.id_to_piece(found)
            for role, found in zip(("<PAD>", "<BOS>", "<EOS>"), _own_ids(self._model))
        ]
        special = ["<CLS>", "<SEP>", "<EOD>", "<MASK>", *roles, *extra_id_tokens(extra_ids)]
        for token in special:
            known.setdefault(token, len(known))
        self._special = {token: known[token] for token in special}
        self._spelled = {number: token for token, number in self._special.items()}
        self._cut = re.compile("(" + "|".join(map(re.escape, self._special)) + ")")
        self.vocab_size = len(known)
        self.cls, self.sep, self.eod, self.mask = (known[token] for token in special[:4])
        self.separators = 1
        self.pad, self.bos, self.eos = (known[role] for role in roles)
        self.sentinels = tuple(known[token] for token in extra_id_tokens(extra_ids))
        self.decoder_start = self.bos

    @cached_property
    @override
    def fingerprint(self) -> str:
        """SHA-256 of the model and the appended tokens, without the sentinels of ``--vocab-extra-ids``."""
        special = {token: number for token, number in self._special.items() if number not in self.sentinels}
        return fingerprint_of([_digest(self._model), special])

    @override
    def tokenize(self, text: str) -> list[int]:
        """Ids of one text; the parts between special tokens are encoded separately."""
        ids: list[int] = []
        for number, part in enumerate(self._cut.split(text)):  # odd parts are the separators
            ids += [self._special[part]] if number % 2 else _encode(self._model, [part])[0]
        return ids

    @override
    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of many texts; only those that spell out a special token go one by one."""
        plain = [text for text in texts if not self._cut.search(text)]
        encoded = iter(_encode(self._model, plain))
        return [self.tokenize(text) if self._cut.search(text) else next(encoded) for text in texts]

    def continuations(self) -> Sequence[bool]:
        """Whether each id continues the previous word: pieces that begin a word begin with a space."""
        pieces = [self._model.id_to_piece(number) for number in range(self._model.get_piece_size())]
        own = [not piece.startswith(_SPACE) and not self._model.is_control(n) for n, piece in enumerate(pieces)]
        return [*own, *[False] * (self.vocab_size - len(own))]

    @override
    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of the ids; special tokens are spelled out."""
        text, run = "", list[int]()
        for number in with_pieces(ids, self.vocab_size):
            if number in self._spelled:
                text += str(self._model.decode(run)) + self._spelled[number]
                run = []
            else:
                run.append(number)
        return text + str(self._model.decode(run))

    @override
    def token_bytes(self, token: int) -> bytes:
        """What a token adds to a text that has begun, as UTF-8; special tokens are spelled out."""
        return self._spelled[token].encode() if token in self._spelled else _piece_bytes(self._model, token)

    @property
    @override
    def special_ids(self) -> frozenset[int]:
        """The special tokens."""
        return frozenset(self._spelled)


def _load(tokenizer_model: str | None, name: str) -> SentencePieceProcessor:
    path = required_file(tokenizer_model, flag="--tokenizer-model", kind=name, holds="a SentencePiece .model file")
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError:
        raise ConfigError(f"{name} needs the sentencepiece library: pip install sentencepiece.") from None
    try:
        return SentencePieceProcessor(model_file=str(path))
    except RuntimeError as error:
        raise DataError(f"--tokenizer-model {path} is not a SentencePiece model: {error}.") from None


def _encode(model: SentencePieceProcessor, texts: Sequence[str], *, begin: bool = False) -> list[list[int]]:
    encoded_texts(texts)  # refuses lone surrogates
    return list(model.encode(list(texts), out_type=int, add_bos=begin, num_threads=1))


def _piece_bytes(model: SentencePieceProcessor, token: int) -> bytes:
    """The byte of a piece that stands for one, else the piece as the library shows it inside a text; b"" for none."""
    if not 0 <= token < model.get_piece_size():
        return b""
    piece = model.id_to_piece(token)
    if model.is_byte(token):
        return bytes.fromhex(piece[3:5])  # <0xE2>
    if model.is_control(token) or model.is_unknown(token):
        return str(model.decode([token])).encode()
    return str(piece).replace(_SPACE, " ").encode()


def _own_ids(model: SentencePieceProcessor) -> list[int | None]:
    """Pad, begin and end of sentence in the model itself, which says -1 for those that it lacks."""
    return [found if found >= 0 else None for found in (model.pad_id(), model.bos_id(), model.eos_id())]


def _digest(model: SentencePieceProcessor) -> str:
    return hashlib.sha256(model.serialized_model_proto()).hexdigest()
