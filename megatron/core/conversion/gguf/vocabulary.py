"""A tokenizer as the ``tokenizer.`` keys of a GGUF file, of which llama.cpp builds its own."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.config.tokenizer import TokenizerConfig
from megatron.core.conversion.companions import text_tokenizer_of
from megatron.core.conversion.gguf.cuts import cut_name
from megatron.core.conversion.gguf.tokenizer_kinds import BYTE_LEVEL, PIECES, UNIGRAMS
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.chat_settings import ChatSettings
from megatron.core.tokenizers.conversations import own_template
from megatron.core.tokenizers.end_tokens import own_ends
from megatron.core.tokenizers.published.sentencepiece_file import BPE, SentencePieceFile, read_sentencepiece
from megatron.core.tokenizers.rust import RustTokenizer
from megatron.errors import CheckpointError, DataError
from megatron.small_files import VOCABULARY_BYTES, read_bytes

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Kinds of tokens in a file."""
_SPACE = "\u2581"
_PREFIX = "tokenizer.ggml."


@dataclass
class _Entries:
    """The vocabulary of a file by id: texts, kinds, and scores where its tokenizer has some."""

    texts: list[str]
    kinds: list[int]
    scores: list[float]

    @classmethod
    def unused(cls, rows: int) -> _Entries:
        """Rows that no text has."""
        return cls([f"[PAD{number}]" for number in range(rows)], [UNUSED] * rows, [-1e4] * rows)

    def put(self, number: int, text: str, kind: int, score: float = 0.0) -> None:
        """Name an id."""
        self.texts[number], self.kinds[number], self.scores[number] = text, kind, score

    def keys(self, *, scored: bool) -> dict[str, Any]:
        """The keys that hold them."""
        found = {f"{_PREFIX}tokens": self.texts, f"{_PREFIX}token_type": self.kinds}
        return {**found, **({f"{_PREFIX}scores": self.scores} if scored else {})}


def vocabulary_keys(config: TokenizerConfig, chat: ChatSettings | None, *, rows: int) -> dict[str, Any]:
    """Keys of the tokenizer and of how texts end, for a model of so many ``rows``; ids alone where it has no tokenizer.

    Raises CheckpointError for a tokenizer that llama.cpp doesn't have.
    """
    tokenizer = text_tokenizer_of(config)
    entries = _Entries.unused(rows)
    if tokenizer is None:
        return _of_ids(entries)
    if isinstance(tokenizer, RustTokenizer):
        spec = json.loads(tokenizer.pipeline.to_str())
        keys = _of_pipeline(spec, config, entries)
        _put_added(spec["added_tokens"], entries)
    elif config.tokenizer_type in ("Llama2Tokenizer", "GPTSentencePieceTokenizer", "SentencePieceTokenizer"):
        keys = _of_pieces(_sentencepiece(Path(config.tokenizer_model or "")), entries)
        for number in range(len(entries.texts)):
            if entries.kinds[number] == UNUSED and number < tokenizer.vocab_size:
                entries.put(number, tokenizer.detokenize([number]), CONTROL)
    else:
        raise CheckpointError(
            f"llama.cpp has no tokenizer like {config.tokenizer_type}; GGUF files are written with byte-level BPE "
            "and SentencePiece"
        )
    keys |= entries.keys(scored=f"{_PREFIX}scores" in keys)
    keys |= _roles(tokenizer, chat)
    own = own_template(config.tokenizer_model) if config.tokenizer_type == "HuggingFaceTokenizer" else None
    template = own if chat is None or chat.template is None else chat.template
    if template is not None:
        keys["tokenizer.chat_template"] = template
    return keys


def spelled_id(number: int) -> str:
    """The text that stands for an id in the file of a model without a tokenizer; llama.cpp wants one."""
    return f"<{number}>"


def _of_ids(entries: _Entries) -> dict[str, Any]:
    for number in range(len(entries.texts)):
        entries.put(number, spelled_id(number), CONTROL)
    end = len(entries.texts) - 1
    roles = {"bos_token_id": end, "eos_token_id": end, "add_bos_token": False, "model": PIECES, "pre": "default"}
    return {**entries.keys(scored=True), **{f"{_PREFIX}{name}": value for name, value in roles.items()}}


def _roles(tokenizer: Tokenizer, chat: ChatSettings | None) -> dict[str, Any]:
    """Which ids begin, end and fill texts, and which of them begin every text."""
    plain, whole = tokenizer.tokenize_parts(["a"])[0], tokenizer.tokenize("a")
    end = tokenizer.eod if tokenizer.eos is None else tokenizer.eos
    found: dict[str, Any] = {
        "bos_token_id": end if tokenizer.bos is None else tokenizer.bos,
        "eos_token_id": end,
        "add_bos_token": whole[: len(whole) - len(plain)][:1] == [tokenizer.bos] if len(whole) > len(plain) else False,
        "add_eos_token": len(whole) > len(plain) and whole[-1] == end != plain[-1],
    }
    if tokenizer.pad is not None:
        found["padding_token_id"] = tokenizer.pad
    others = sorted({*own_ends(tokenizer), *(chat.end_tokens if chat else ())} - {end})
    if len(others) > 2:
        raise CheckpointError(
            f"texts of this model end with any of the tokens {end}, {', '.join(map(str, others))}, and a GGUF file "
            "names three at most: take some out of eos_token_id in generation_config.json"
        )
    found |= dict(zip(("eot_token_id", "eom_token_id"), others))
    return {f"{_PREFIX}{name}": value for name, value in found.items()}


def _of_pipeline(spec: Mapping[str, Any], config: TokenizerConfig, entries: _Entries) -> dict[str, Any]:
    """Keys of the model of a pipeline of the tokenizers library."""
    model = spec["model"]
    kind = model.get("type")
    given = Path(config.tokenizer_model or config.vocab_file or "")
    beside = (given if given.is_dir() else given.parent) / "tokenizer.model"
    if kind in ("BPE", "Unigram") and _is_spaced(spec) and beside.is_file():
        return _of_pieces(_sentencepiece(beside), entries)
    if kind == "Unigram":
        for number, (text, score) in enumerate(model["vocab"]):
            entries.put(number, text, _piece_kind(text, number == model.get("unk_id")), score)
        return {f"{_PREFIX}model": UNIGRAMS, f"{_PREFIX}scores": (), **_spaces(spec), **_normalization(spec)}
    if kind != "BPE":
        raise CheckpointError(f"llama.cpp has no tokenizer whose model is {kind}: BPE and unigrams are written")
    merges = [each if isinstance(each, list) else each.split(" ") for each in model["merges"]]
    if _is_spaced(spec):
        ranks = {"".join(pair): -float(rank) for rank, pair in reversed([*enumerate(merges)])}
        for text, number in model["vocab"].items():
            kind_of_piece = _piece_kind(text, text == model.get("unk_token"))
            entries.put(number, text, kind_of_piece, ranks.get(text, -1e6 if kind_of_piece == NORMAL else 0.0))
        return {f"{_PREFIX}model": PIECES, f"{_PREFIX}pre": "default", f"{_PREFIX}scores": (), **_spaces(spec)}
    for text, number in model["vocab"].items():
        entries.put(number, text, NORMAL)
    return {
        f"{_PREFIX}model": BYTE_LEVEL,
        f"{_PREFIX}pre": cut_name(spec),
        f"{_PREFIX}merges": [" ".join(pair) for pair in merges],
    }


def _normalization(spec: Mapping[str, Any]) -> dict[str, Any]:
    """What SentencePiece does to texts of unigrams first: other characters for some, and one space for several."""
    normalizer = spec["normalizer"] or {}
    steps = normalizer.get("normalizers", [normalizer])
    charsmap = next((each["precompiled_charsmap"] for each in steps if each.get("type") == "Precompiled"), None)
    text = json.dumps([normalizer, spec["pre_tokenizer"]])
    keys: dict[str, Any] = {f"{_PREFIX}remove_extra_whitespaces": '"WhitespaceSplit"' in text or "{2,}" in text}
    if charsmap:
        keys[f"{_PREFIX}precompiled_charsmap"] = base64.b64decode(charsmap)
    return keys


def _is_spaced(spec: Mapping[str, Any]) -> bool:
    """Whether pieces spell spaces as SentencePiece does."""
    return _SPACE in json.dumps([spec["normalizer"], spec["pre_tokenizer"]], ensure_ascii=False)


def _spaces(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Whether a space is put before a text."""
    text = json.dumps([spec["normalizer"], spec["pre_tokenizer"]])
    return {
        f"{_PREFIX}add_space_prefix": '"Prepend"' in text or '"prepend_scheme": "always"' in text or '"first"' in text
    }


def _piece_kind(text: str, is_unknown: bool) -> int:
    is_byte = len(text) == 6 and text.startswith("<0x") and text.endswith(">")
    return UNKNOWN if is_unknown else BYTE if is_byte else NORMAL


def _sentencepiece(path: Path) -> SentencePieceFile:
    try:
        content = read_bytes(path, where=str(path), error=CheckpointError, most_bytes=VOCABULARY_BYTES)
        found = read_sentencepiece(content, where=str(path))
    except DataError as error:
        raise CheckpointError(str(error)) from None
    if found is None:
        raise CheckpointError(f"{path} is no SentencePiece model")
    return found


def _of_pieces(model: SentencePieceFile, entries: _Entries) -> dict[str, Any]:
    """Keys of a SentencePiece model."""
    for number, piece in enumerate(model.pieces[: len(entries.texts)]):
        kind = CONTROL if piece.is_control else USER_DEFINED if piece.is_symbol else NORMAL
        entries.put(
            number, piece.text, kind if kind != NORMAL else _piece_kind(piece.text, number == model.unk_id), piece.score
        )
    keys: dict[str, Any] = {f"{_PREFIX}model": PIECES if model.kind == BPE else UNIGRAMS, f"{_PREFIX}scores": ()}
    keys[f"{_PREFIX}add_space_prefix"] = model.adds_space
    if model.kind == BPE:
        keys[f"{_PREFIX}pre"] = "default"
    else:
        keys[f"{_PREFIX}remove_extra_whitespaces"] = model.removes_spaces
        if model.charsmap:
            keys[f"{_PREFIX}precompiled_charsmap"] = model.charsmap
    if model.unk_id >= 0:
        keys[f"{_PREFIX}unknown_token_id"] = model.unk_id
    return keys


def _put_added(added: Sequence[Mapping[str, Any]], entries: _Entries) -> None:
    """Tokens that are never cut: those that shape texts, and others."""
    for token in added:
        number = token["id"]
        if number < len(entries.texts) and entries.kinds[number] not in (UNKNOWN, BYTE):
            entries.put(number, token["content"], CONTROL if token["special"] else USER_DEFINED, entries.scores[number])
