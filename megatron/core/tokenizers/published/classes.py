"""Which class of tokenizers a folder's files name: it decides how text is cut, also beside a tokenizer.json.

The classes are data, in classes.json. Rules and names are those of transformers 5, the reference for what a published
folder means.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron.errors import DataError
from megatron.small_files import as_kind

AS_WRITTEN = "TokenizersBackend"
"""The class that takes a tokenizer.json as it is."""
GENERAL_FILES = ("tokenizer.model", "tiktoken.model")
"""Files of pieces that a folder of no particular class may have."""


@dataclass(frozen=True)
class Surrounds:
    """Roles of the tokens before and behind a text. ``separators``: how many of the latter stand between two texts.

    ``always``: also beside a tokenizer.json that says something else.
    """

    before: str | None = None
    behind: str | None = None
    separators: int = 1
    always: bool = True

    def template(self, words: Mapping[str, str]) -> tuple[str, str]:
        """What becomes of one text and of two, in the library's words. ``words``: spellings of the roles."""
        first = [words[self.before]] if self.before else []
        last = [words[self.behind]] if self.behind else []
        return " ".join([*first, "$A", *last]), " ".join([*first, "$A", *last * self.separators, "$B", *last])


@dataclass(frozen=True)
class Arrangement:
    """Pieces that take the place of the first ``replaced`` of a SentencePiece model, and others behind all of them.

    A name of a role stands for its spelling.
    """

    replaced: int
    first: tuple[str, ...]
    last: tuple[str, ...]


@dataclass(frozen=True)
class TokenizerClass:
    """A class of tokenizers that builds its pipeline from a vocabulary and settings, whatever a tokenizer.json says.

    ``parts``: name of its parts. ``model``: kind of its vocabulary. ``vocabulary``: its files without tokenizer.json.
    ``model_types``: of config.json; a model of such a type has this class. ``roles``: spellings that count where no
    file names a role, if the vocabulary has them. ``surrounds``: what it puts around texts; None: as the tokenizer.json
    or ``add_bos_token`` and ``add_eos_token`` say. ``begins``: whether texts begin with BOS unless settings say no.
    ``resets``: what a tokenizer.json puts around texts doesn't count. ``further``: special tokens without a role where
    no file lists any, if the vocabulary has them. ``has_sentinels``: ``<extra_id_N>`` are such tokens. ``unk_id``: of
    unigrams; ``is_unk_by_name``: only where the unknown token isn't found. ``repeats_roles``: roles are added as tokens
    once more.
    """

    parts: str
    model: Literal["BPE", "Unigram", "WordPiece"]
    vocabulary: tuple[str, ...]
    model_types: tuple[str, ...]
    other_names: tuple[str, ...] = ()
    roles: Mapping[str, str] = field(default_factory=dict)
    surrounds: Surrounds | None = None
    begins: bool = False
    resets: bool = False
    further: tuple[str, ...] = ()
    has_sentinels: bool = False
    unk_id: int | None = None
    is_unk_by_name: bool = False
    repeats_roles: Literal["plain", "special"] | None = None
    arrangement: Arrangement | None = None


@dataclass(frozen=True)
class _Known:
    """What classes.json holds.

    ``as_written_types``: models whose tokenizer.json counts, whatever class is named. ``wrongly_named_types``: models
    whose published tokenizer_config.json names a class that doesn't fit: the class of the type counts. ``unsupported``:
    classes with rules of their own, which aren't reproduced here.
    """

    classes: Mapping[str, TokenizerClass]
    as_written_types: tuple[str, ...]
    mistral_types: tuple[str, ...]
    wrongly_named_types: tuple[str, ...]
    unsupported: tuple[str, ...]
    unsupported_types: tuple[str, ...]


def _read_known() -> _Known:
    path = Path(__file__).with_suffix(".json")
    known: _Known = as_kind(json.loads(path.read_text(encoding="utf-8")), _Known, where=str(path), error=DataError)
    return known


_KNOWN = _read_known()
CLASSES = _KNOWN.classes
"""The supported classes by name."""
_NO_NAME = "a class of its own"
_CLASS_OF_NAME = {other: name for name, each in CLASSES.items() for other in (name, *each.other_names)}
_CLASS_OF_TYPE = {
    **{model_type: name for name, each in CLASSES.items() for model_type in each.model_types},
    **dict.fromkeys(_KNOWN.as_written_types, AS_WRITTEN),
    **dict.fromkeys(_KNOWN.unsupported_types, _NO_NAME),
}


def class_of(settings: Mapping[str, Any], model: Mapping[str, Any], *, is_byte_level: bool, where: str) -> str:
    """AS_WRITTEN or one of CLASSES. ``settings``: tokenizer_config.json; ``model``: config.json.

    ``is_byte_level``: whether there is a tokenizer.json of byte-level BPE. Raises DataError for any other class.
    """
    own, model_type = _text(settings, "tokenizer_class"), _text(model, "model_type") or ""
    named = own or _text(model, "tokenizer_class")
    registered, is_wrong = _CLASS_OF_TYPE.get(model_type), model_type in _KNOWN.wrongly_named_types
    plain = named.removesuffix("Fast") if named else None
    if plain is not None and (is_wrong or not _has_code(settings)):
        is_fitting = not is_wrong and model_type not in _KNOWN.mistral_types
        if plain == "LlamaTokenizer" and is_fitting and is_byte_level:
            return AS_WRITTEN
        if registered is not None and registered != plain:
            if registered == AS_WRITTEN:
                return AS_WRITTEN
            return _supported(registered if is_wrong else plain, where)
    if own is not None or (plain is not None and registered is None):
        return _supported(plain or "", where)
    return _supported(registered or AS_WRITTEN, where)


def is_plain(tokenizer_class: str) -> bool:
    """Whether a class does no more with a vocabulary than the kinds of tokenizers for files without settings do."""
    return tokenizer_class == AS_WRITTEN or (
        CLASSES[tokenizer_class].parts == "byte_level" and (CLASSES[tokenizer_class].surrounds is None)
    )


def needs_code(settings: Mapping[str, Any], model: Mapping[str, Any]) -> bool:
    """Whether the folder's tokenizer is a program in the folder, which is never run."""
    model_type, named = _text(model, "model_type") or "", _text(settings, "tokenizer_class") or ""
    known = {*_CLASS_OF_NAME, *_KNOWN.unsupported, AS_WRITTEN}
    is_known = model_type in _CLASS_OF_TYPE or named.removesuffix("Fast") in known
    return _has_code(settings) and model_type not in _KNOWN.wrongly_named_types and not is_known


def _has_code(settings: Mapping[str, Any]) -> bool:
    found = settings.get("auto_map")
    return isinstance(found, list) or (isinstance(found, dict) and found.get("AutoTokenizer") is not None)


def _supported(name: str, where: str) -> str:
    """The class that a name means; names that nobody knows mean AS_WRITTEN."""
    if name in _KNOWN.unsupported or name == _NO_NAME:
        raise DataError(
            f"{where} is of {name}, which cuts text by rules of its own and isn't supported: with a tokenizer.json and "
            f'"tokenizer_class": "{AS_WRITTEN}" in tokenizer_config.json that file is used as it is.'
        )
    return _CLASS_OF_NAME.get(name, AS_WRITTEN)


def _text(found: Mapping[str, Any], key: str) -> str | None:
    value = found.get(key)
    return value if isinstance(value, str) and value else None
