"""The pieces and settings in a SentencePiece model file: a protocol buffer, of which the few fields used are read here.

Field numbers are those of SentencePiece's ``sentencepiece_model.proto``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.errors import DataError

UNIGRAM, BPE = 1, 2
_CONTROL, _USER_DEFINED = 3, 4
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class Piece(NamedTuple):
    """An entry of the vocabulary. ``is_control``: stands for no text; ``is_symbol``: is never cut into others."""

    text: str
    score: float
    is_control: bool
    is_symbol: bool


@dataclass(frozen=True)
class SentencePieceFile:
    """A model's vocabulary in the order of ids. ``charsmap``: its compiled normalization rules, empty without any.

    ``roles``: spellings of ``bos_token``, ``eos_token`` and ``unk_token``, where the model has them. ``adds_space``:
    whether a space is put before a text; ``removes_spaces``: whether others beside one are removed.
    """

    pieces: tuple[Piece, ...]
    kind: int
    byte_fallback: bool
    charsmap: bytes
    unk_id: int
    unk_piece: str
    roles: dict[str, str]
    adds_space: bool = True
    removes_spaces: bool = True


def read_sentencepiece(content: bytes, *, where: str) -> SentencePieceFile | None:
    """The model in a file's bytes; None for a file that is none. Raises DataError for models of words or characters."""
    try:
        model = list(_fields(content))
        pieces = tuple(_piece(part) for number, part in model if number == 1)
        trainer = dict(_fields(b"".join(part for number, part in model if number == 2)))
        normalizer = dict(_fields(b"".join(part for number, part in model if number == 3)))
        words = {number: str(trainer[number], "utf-8") for number in (45, 46, 47) if number in trainer}
    except (ValueError, TypeError, struct.error):  # UnicodeDecodeError is a ValueError
        return None
    if not pieces:
        return None
    kind = int(trainer.get(3, UNIGRAM))
    if kind not in (UNIGRAM, BPE):
        raise DataError(f"{where} is a SentencePiece model of words or characters; give one of BPE or unigrams.")
    ids = {"bos_token": _signed(trainer.get(41, 1)), "eos_token": _signed(trainer.get(42, 2))}
    unk_id = _signed(trainer.get(40, 0))
    spelled = {"bos_token": words.get(46) or "<s>", "eos_token": words.get(47) or "</s>"}
    unk_piece = words.get(45) or "<unk>"
    roles = {role: spelled[role] for role, number in ids.items() if number >= 0}
    roles |= {"unk_token": unk_piece} if unk_id >= 0 else {}
    return SentencePieceFile(
        pieces=pieces,
        kind=kind,
        byte_fallback=bool(trainer.get(35, 0)),
        charsmap=normalizer.get(2, b""),
        unk_id=unk_id,
        unk_piece=unk_piece,
        roles=roles,
        adds_space=bool(normalizer.get(3, 1)),
        removes_spaces=bool(normalizer.get(4, 1)),
    )


def _piece(message: bytes) -> Piece:
    found = dict(_fields(message))
    kind = found.get(3, 1)
    score = struct.unpack("<f", found[2])[0] if 2 in found else 0.0
    return Piece(str(found.get(1, b""), "utf-8"), score, kind == _CONTROL, kind == _USER_DEFINED)


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field: an int, or the bytes of anything else. Raises ValueError for other bytes."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            value, at = _varint(message, at)
            yield number, value
            continue
        if kind == _BYTES:
            size, at = _varint(message, at)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError("no protocol buffer")
        if number == 0 or at + size > len(message):
            raise ValueError("no protocol buffer")
        yield number, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A number in groups of seven bits, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            break
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("no protocol buffer")


def _signed(value: int) -> int:
    """A 32-bit number, whose negative values are written with 64 bits."""
    return value - (1 << 64) if value >= 1 << 63 else value
