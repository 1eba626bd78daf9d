"""The vocabulary of a folder without tokenizer.json, as a tokenizer.json's ``model`` describes one."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import models

from megatron.core.tokenizers.published.classes import AS_WRITTEN, CLASSES, GENERAL_FILES
from megatron.core.tokenizers.published.library import panics_as_errors
from megatron.core.tokenizers.published.sentencepiece_file import BPE, SentencePieceFile, read_sentencepiece
from megatron.core.tokenizers.rust import BYTE_CHARACTERS
from megatron.errors import DataError
from megatron.small_files import VOCABULARY_BYTES, has_file, read_bytes, read_json

TIKTOKEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)"
    r"|\s+"
)
_WORD_PIECES, _MERGES = "vocab.txt", "merges.txt"
VOCABULARY_FILES = (
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "spm.model", "tiktoken.model"),
    *("vocab.json", _MERGES, _WORD_PIECES),
)
"""Names of the files of a folder that hold a vocabulary, beside or in place of tokenizer.json."""
_LONGEST_PIECE = 2_000  # the time to find merges grows with its square; real pieces have up to some hundred


@dataclass(frozen=True)
class Vocabulary:
    """Pieces and merges. ``sentencepiece``: the file they are from, if it is one; ``ranks``: whether of tiktoken."""

    model: dict[str, Any]
    sentencepiece: SentencePieceFile | None = None
    is_ranks: bool = False


def has_vocabulary(folder: Path, tokenizer_class: str) -> bool:
    """Whether a folder without tokenizer.json has the files of a class: all of them with merges, else any."""
    names = _files(tokenizer_class)
    found = [has_file(folder / name, error=DataError) for name in names]
    return all(found) if _MERGES in names else any(found)


def read_vocabulary(folder: Path, tokenizer_class: str) -> Vocabulary:
    """The vocabulary that a class reads from a folder; raises DataError where its files are missing or damaged."""
    names = _files(tokenizer_class)
    found = [folder / name for name in names if has_file(folder / name, error=DataError)]
    if not has_vocabulary(folder, tokenizer_class):
        raise _missing(folder, tokenizer_class, (" and " if _MERGES in names else " or ").join(names))
    if _MERGES in names:
        return Vocabulary(_merged(*found))
    if names == (_WORD_PIECES,):
        return Vocabulary({"type": "WordPiece", "vocab": _lines(found[0])})
    return _of_pieces(found[0], tokenizer_class)


def _files(tokenizer_class: str) -> tuple[str, ...]:
    return CLASSES[tokenizer_class].vocabulary if tokenizer_class in CLASSES else GENERAL_FILES


def _missing(folder: Path, tokenizer_class: str, names: str) -> DataError:
    where, has = f"--tokenizer-model {folder} holds no tokenizer.json", {path.name for path in folder.iterdir()}
    if tokenizer_class != AS_WRITTEN:
        return DataError(f"{where} and no {names}, the vocabulary of its {tokenizer_class}: copy them there.")
    if has >= {"vocab.json", "merges.txt"}:
        advice = f"GPT2BPETokenizer --vocab-file {folder / 'vocab.json'} --merge-file {folder / 'merges.txt'}"
    elif _WORD_PIECES in has:
        advice = f"BertWordPieceCase --vocab-file {folder / _WORD_PIECES}"
    elif models := sorted(name for name in has if name.endswith(".model")):
        advice = f"GPTSentencePieceTokenizer --tokenizer-model {folder / models[0]}"
    else:
        return DataError(f"{where}; give a folder or file of a fast tokenizer.")
    return DataError(
        f"{where}, and no file names its class: add config.json or tokenizer_config.json of its model, or use "
        f"--tokenizer-type {advice}."
    )


def _merged(vocab: Path, merges: Path) -> dict[str, Any]:
    """A BPE of vocab.json and merges.txt."""
    where = f"--tokenizer-model {vocab}"
    ids = read_json(vocab, dict[str, int], where=where, error=DataError, most_bytes=VOCABULARY_BYTES)
    with panics_as_errors(f"{vocab} and {merges} are not a vocab.json and merges.txt of one BPE"):
        _, pairs = models.BPE.read_file(str(vocab), str(merges))
    taken: dict[int, str] = {}
    for token, number in ids.items():
        if (other := taken.setdefault(number, token)) != token:
            raise DataError(f"{where}: {other!r} and {token!r} both have the id {number}, so it cannot be decoded.")
    return {"type": "BPE", "vocab": ids, "merges": [list(pair) for pair in pairs]}


def _lines(path: Path) -> dict[str, int]:
    """The pieces of a vocab.txt and their line numbers; of a repeated one the last counts."""
    with panics_as_errors(f"--tokenizer-model {path} is not a vocab.txt"):
        return dict(models.WordPiece.read_file(str(path)))


def _of_pieces(path: Path, tokenizer_class: str) -> Vocabulary:
    where = f"--tokenizer-model {path}"
    content = read_bytes(path, where=where, error=DataError, most_bytes=VOCABULARY_BYTES)
    found = None if path.name == "tiktoken.model" else read_sentencepiece(content, where=where)
    if found is None:
        return Vocabulary(_of_ranks(content, where), is_ranks=True)
    is_bpe = CLASSES[tokenizer_class].model == "BPE" if tokenizer_class in CLASSES else found.kind == BPE
    if not is_bpe:
        pieces = [[piece.text, piece.score] for piece in found.pieces]
        return Vocabulary({"type": "Unigram", "vocab": pieces, "unk_id": found.unk_id}, found)
    ids = {piece.text: number for number, piece in enumerate(found.pieces)}
    _check_lengths(ids, where)
    return Vocabulary({"type": "BPE", "vocab": ids, "merges": _merges_of(ids)}, found)


def _check_lengths(pieces: Collection[str] | Collection[bytes], where: str) -> None:
    if (longest := max(map(len, pieces), default=0)) > _LONGEST_PIECE:
        raise DataError(f"{where} has a piece of length {longest:,}; the longest that is read has {_LONGEST_PIECE:,}.")


def _merges_of(ids: dict[str, int]) -> list[list[str]]:
    """All ways to make a piece of two others; SentencePiece's BPE numbers its pieces in the order of its merges."""
    found = [
        (number, cut, [piece[:cut], piece[cut:]])
        for piece, number in ids.items()
        for cut in range(1, len(piece))
        if piece[:cut] in ids and piece[cut:] in ids
    ]
    found.sort(key=lambda merge: merge[:2])
    return [pair for _, _, pair in found]


def _of_ranks(content: bytes, where: str) -> dict[str, Any]:
    """A byte-level BPE of lines with a token in base64 and its rank."""
    try:
        pairs = [line.split() for line in content.splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (ValueError, binascii.Error):
        raise DataError(f"{where} is neither a SentencePiece model nor a tiktoken file of tokens and ranks.") from None
    if not ranks:
        raise DataError(f"{where} is empty.")
    _check_lengths(ranks, where)
    merges = [
        (rank, ranks[token[:cut]], ranks[token[cut:]], [_spelled(token[:cut]), _spelled(token[cut:])])
        for token, rank in ranks.items()
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    merges.sort(key=lambda merge: merge[:3])
    vocab = {_spelled(token): rank for token, rank in ranks.items()}
    return {"type": "BPE", "vocab": vocab, "merges": [merge[3] for merge in merges], "ignore_merges": True}


def _spelled(token: bytes) -> str:
    return "".join(BYTE_CHARACTERS[value] for value in token)
