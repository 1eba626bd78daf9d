"""The tokenizer of a GGUF file as the files that published models have, of which this project builds its own."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.conversion.gguf.cuts import WHOLE_WORDS, pre_tokenizer
from megatron.core.conversion.gguf.tokenizer_kinds import BYTE_LEVEL, CLASSES, PIECES, UNIGRAMS
from megatron.core.conversion.gguf.vocabulary import CONTROL, NORMAL, UNUSED, USER_DEFINED, spelled_id
from megatron.errors import CheckpointError

_BPE, _UNIGRAM = 2, 1


def write_tokenizer(keys: Mapping[str, Any], folder: Path) -> None:
    """Write the files into ``folder``; an empty folder where the vocabulary is ids alone.

    Raises CheckpointError for a kind of tokenizer that isn't read.
    """
    words = {name.removeprefix("tokenizer.ggml."): value for name, value in keys.items()}
    tokens: list[str] = words.get("tokens", [])
    kind = words.get("model", "none")
    if kind in ("none", "no_vocab") or tokens == [spelled_id(number) for number in range(len(tokens))]:
        folder.mkdir(parents=True, exist_ok=True)
        return
    kinds = words.get("token_type") or [NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise CheckpointError(f"tokenizer.ggml.token_type has {len(kinds)} entries for {len(tokens)} tokens")
    folder.mkdir(parents=True, exist_ok=True)
    if kind == BYTE_LEVEL:
        _write_json(folder / "tokenizer.json", _byte_level(words, tokens, kinds))
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    elif kind in CLASSES:
        (folder / "tokenizer.model").write_bytes(_sentencepiece(words, tokens, kinds))
        settings = {"tokenizer_class": CLASSES[kind]}
        settings |= {"add_bos_token": bool(words.get("add_bos_token", kind == PIECES))}
        settings["add_prefix_space"] = bool(words.get("add_space_prefix", True))
        settings |= {"add_eos_token": bool(words.get("add_eos_token", kind == UNIGRAMS)), "extra_ids": 0}
    else:
        raise CheckpointError(
            f"tokenizer.ggml.model is {kind!r}: {BYTE_LEVEL} (byte-level BPE), {PIECES} and {UNIGRAMS} (SentencePiece) "
            "are read"
        )
    for role, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = words.get(f"{name}_token_id")
        if number is not None and 0 <= number < len(tokens):
            settings[f"{role}_token"] = tokens[number]
    _write_json(folder / "tokenizer_config.json", settings)
    if "decoder_start_token_id" in keys:  # where a model with an encoder has it
        _write_json(folder / "config.json", {"decoder_start_token_id": keys["decoder_start_token_id"]})
    _write_ends(words, folder)
    if template := keys.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _write_ends(words: Mapping[str, Any], folder: Path) -> None:
    """The ids that end a text, as transformers' settings of generation say them."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    ends = list(dict.fromkeys(words[name] for name in names if name in words))
    if ends:
        _write_json(folder / "generation_config.json", {"eos_token_id": ends if len(ends) > 1 else ends[0]})


def _byte_level(words: Mapping[str, Any], tokens: list[str], kinds: list[int]) -> dict[str, Any]:
    """The description of byte-level BPE, of the tokenizers library."""
    name = str(words.get("pre", "default"))
    added = [
        {
            "id": number,
            "content": token,
            "special": kinds[number] == CONTROL,
            "normalized": False,
            **dict.fromkeys(("single_word", "lstrip", "rstrip"), False),
        }
        for number, token in enumerate(tokens)
        if kinds[number] in (CONTROL, USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer(name),
        "post_processor": _ends_of_texts(words, tokens, begins=name in WHOLE_WORDS),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {token: number for number, token in enumerate(tokens) if kinds[number] != UNUSED},
            "merges": words.get("merges", []),
            "ignore_merges": name in WHOLE_WORDS,
        },
    }


def _ends_of_texts(words: Mapping[str, Any], tokens: list[str], *, begins: bool) -> dict[str, Any] | None:
    """The part of byte-level BPE that puts tokens around texts. ``begins``: whether llama.cpp puts one before texts
    where the file doesn't say.
    """
    bos, eos = words.get("bos_token_id", -1), words.get("eos_token_id", -1)
    before = [bos] if words.get("add_bos_token", begins) and 0 <= bos < len(tokens) else []
    after = [eos] if words.get("add_eos_token") and 0 <= eos < len(tokens) else []
    if not before + after:
        return None

    def around(letters: str) -> list[dict[str, Any]]:
        one, other = ([{"SpecialToken": {"id": tokens[each], "type_id": 0}} for each in ids] for ids in (before, after))
        return [*one, *({"Sequence": {"id": letter, "type_id": 0}} for letter in letters), *other]

    known = {tokens[each]: {"id": tokens[each], "ids": [each], "tokens": [tokens[each]]} for each in before + after}
    return {"type": "TemplateProcessing", "single": around("A"), "pair": around("AB"), "special_tokens": known}


def _sentencepiece(words: Mapping[str, Any], tokens: list[str], kinds: list[int]) -> bytes:
    """A SentencePiece model: a protocol buffer, whose kinds of pieces have the numbers of GGUF's kinds of tokens."""
    scores = words.get("scores") or [0.0] * len(tokens)
    if len(scores) != len(tokens):
        raise CheckpointError(f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens")
    pieces = (
        _field(1, _field(1, text.encode()) + _tag(2, 5) + struct.pack("<f", score) + _number(3, kind))
        for text, score, kind in zip(tokens, scores, kinds)
    )
    ids = {40: "unknown", 41: "bos", 42: "eos", 43: "padding"}
    numbers = {number: words.get(f"{name}_token_id", 0 if name == "unknown" else -1) for number, name in ids.items()}
    trainer = {3: _BPE if words.get("model") == PIECES else _UNIGRAM, 35: int(6 in kinds), **numbers}
    normalizer = {3: int(words.get("add_space_prefix", True)), 4: int(words.get("remove_extra_whitespaces", False))}
    charsmap = bytes(bytearray(each & 0xFF for each in words.get("precompiled_charsmap", ())))
    return b"".join(
        [
            *pieces,
            _field(2, b"".join(_number(number, value) for number, value in trainer.items())),
            _field(3, _field(2, charsmap) + b"".join(_number(number, value) for number, value in normalizer.items())),
        ]
    )


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _tag(number: int, kind: int) -> bytes:
    return _varint(number << 3 | kind)


def _number(number: int, value: int) -> bytes:
    return _tag(number, 0) + _varint(value)


def _field(number: int, content: bytes) -> bytes:
    return _tag(number, 2) + _varint(len(content)) + content


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
