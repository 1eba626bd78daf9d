"""What the files of a published tokenizer say together: settings, roles and tokens outside the vocabulary.

Where they say different things, what counts is what counts for transformers 5.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tokenizers import AddedToken, Tokenizer

from megatron.core.tokenizers.published.classes import class_of, needs_code
from megatron.core.tokenizers.published.library import parsed_pipeline
from megatron.errors import DataError
from megatron.small_files import VOCABULARY_BYTES, Between, check_kinds, has_file, read_json, read_text

STANDARD_ROLES = tuple(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_SWITCHES = (
    "add_bos_token",
    "add_eos_token",
    "add_prefix_space",
    "clean_up_tokenization_spaces",
    "do_lower_case",
    "keep_accents",
    "legacy",
    "split_by_punct",
    "split_special_tokens",
    "strip_accents",
    "tokenize_chinese_chars",
)
_EXTRA_IDS, _MOST_EXTRA_IDS = 100, 100_000
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class TokenizerFolder:
    """A tokenizer's files, merged.

    ``written``: its tokenizer.json as text, None without one; ``pipeline``: the same, parsed. ``tokenizer_class``: how
    text is cut.
    ``settings``: those that are neither roles nor tokens. ``roles``: tokens by role as the files name them, None for
    roles that they switch off. ``added_by_id``: tokens that they list. ``further``: special tokens
    without a role, None where no file has such a list; ``is_older_list``: it is special_tokens_map.json's alone.
    ``extra_ids``: number of sentinels. ``decoder_start_id`` and ``rows``, the size of the embedding: of config.json.
    """

    path: Path
    written: str | None
    pipeline: Tokenizer | None
    tokenizer_class: str
    settings: Mapping[str, Any]
    roles: Mapping[str, str | AddedToken | None]
    further: tuple[str | AddedToken, ...] | None
    is_older_list: bool
    decoder_start_id: int | None
    added_by_id: Mapping[int, AddedToken]
    extra_ids: int | None
    rows: int | None

    @property
    def added(self) -> tuple[AddedToken, ...]:
        """Tokens that the files list, in the order of their ids."""
        return tuple(token for _, token in sorted(self.added_by_id.items(), key=lambda pair: pair[0]))

    def num_extra_ids(self, num_pieces: int) -> int:
        """Sentinels that T5's class adds to a model of ``num_pieces``: 100 where no file has a number, if they fit."""
        if self.extra_ids is not None:
            return self.extra_ids
        return 0 if self.rows is not None and num_pieces + _EXTRA_IDS > self.rows else _EXTRA_IDS

    def switch(self, name: str, *, default: bool) -> bool:
        """A setting that is on or off; ``default`` where no file has it."""
        return bool(self.settings.get(name, default))


def read_folder(path: Path, pipeline_file: Path | None) -> TokenizerFolder:
    """The files in the folder ``path``; ``pipeline_file``: its tokenizer.json, which may have another name.

    Raises DataError for files that say no tokenizer, or one of a class that isn't supported.
    """
    settings = _read(path / "tokenizer_config.json")
    kinds = {**dict.fromkeys(_SWITCHES, bool), "extra_ids": Annotated[int, Between(0, _MOST_EXTRA_IDS)]}
    check_kinds(settings, kinds, where=str(path / "tokenizer_config.json"), error=DataError)
    model = _read(path / "config.json")
    written, pipeline = None, None
    if pipeline_file is not None:
        where = f"--tokenizer-model {pipeline_file}"
        written = read_text(pipeline_file, where=where, error=DataError, most_bytes=VOCABULARY_BYTES)
        pipeline = parsed_pipeline(written, where=where)
    is_byte_level = written is not None and '"ByteLevel"' in written
    found = class_of(settings, model, is_byte_level=is_byte_level, where=str(pipeline_file or path))
    if pipeline is None and needs_code(settings, model):
        raise DataError(
            f"{path} has its tokenizer as a program (auto_map), which is never run, and no tokenizer.json: give a "
            "folder with one, or the vocabulary file with another --tokenizer-type."
        )
    if pipeline is not None:  # it says itself what begins and ends a text
        settings = {key: value for key, value in settings.items() if key not in ("add_bos_token", "add_eos_token")}
    merged = _Merged(path, dict(settings))
    merged.rename_further()
    listed = merged.tokens(pipeline)
    roles = {role: listed.get(str(token), token) for role, token in merged.roles.items() if token is not None}
    start, rows = model.get("decoder_start_token_id"), model.get("vocab_size")
    return TokenizerFolder(
        path=path,
        written=written,
        pipeline=pipeline,
        tokenizer_class=found,
        settings=merged.settings,
        roles={**dict.fromkeys(merged.roles), **roles},
        further=merged.further(),
        is_older_list="extra_special_tokens" not in merged.settings,
        decoder_start_id=start if type(start) is int and start >= 0 else None,
        added_by_id=merged.by_id,
        extra_ids=merged.settings.get("extra_ids"),
        rows=rows if type(rows) is int else None,
    )


def folder_class(path: Path) -> str:
    """The class that a folder without tokenizer.json names; DataError for one that isn't supported."""
    settings, model = _read(path / "tokenizer_config.json"), _read(path / "config.json")
    return class_of(settings, model, is_byte_level=False, where=str(path))


class _Merged:
    """The settings and tokens of several files, each of which may override others."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.settings = path, settings
        self.where = str(path / "tokenizer_config.json")
        self.roles: dict[str, str | AddedToken | None] = {}
        self.by_id: dict[int, AddedToken] = {}
        self._take_roles(settings, self.where, special=False)

    def rename_further(self) -> None:
        """Take the older name of the list of further special tokens where the newer one has nothing."""
        if "additional_special_tokens" in self.settings and not self.settings.get("extra_special_tokens"):
            self.settings["extra_special_tokens"] = self.settings.pop("additional_special_tokens")
        if isinstance(self.settings.get("extra_special_tokens"), dict):
            self._take_roles(self.settings.pop("extra_special_tokens"), self.where, special=False, are_all=True)

    def tokens(self, pipeline: Tokenizer | None) -> dict[str, AddedToken]:
        """Listed tokens by spelling; ``added_tokens_decoder`` alone, or what the older files and tokenizer.json say."""
        found: dict[str, AddedToken] = {}
        if "added_tokens_decoder" in self.settings:
            for number, token in self._object(self.settings["added_tokens_decoder"], "added_tokens_decoder").items():
                self._list(number, added_token(token, self.where, special=None), found, self.where)
            return found
        self._take_map()
        special = {str(token) for token in self.roles.values() if token is not None}
        special |= {str(token) for token in self._tokens_of("extra_special_tokens")}
        path = self.path / "added_tokens.json"
        for word, number in _read(path).items():
            is_special = word in special
            flags = {"normalized": not is_special, "special": is_special}
            self._list(number, _token(word, str(path), **flags), found, str(path))
        for place, token in (pipeline.get_added_tokens_decoder() if pipeline else {}).items():
            self._list(place, token, found, "tokenizer.json")
        return found

    def further(self) -> tuple[str | AddedToken, ...] | None:
        """Special tokens without a role; None where no file has a list of them."""
        names = ("extra_special_tokens", "additional_special_tokens")
        name = next((each for each in names if each in self.settings), None)
        return None if name is None else tuple(self._tokens_of(name))

    def _take_map(self) -> None:
        """Take special_tokens_map.json, which only counts without an ``added_tokens_decoder``."""
        path = self.path / "special_tokens_map.json"
        found = _read(path)
        self._take_roles(found, str(path), special=True)
        if isinstance(found.get("extra_special_tokens"), dict):
            self._take_roles(found["extra_special_tokens"], str(path), special=True, are_all=True)
        elif "extra_special_tokens" in found:
            known = list(self._tokens_of("extra_special_tokens"))
            more = _list_of_tokens(found["extra_special_tokens"], f"{path}: extra_special_tokens")
            words = set(map(str, known))
            self.settings["extra_special_tokens"] = [*known, *(each for each in more if str(each) not in words)]
        if "additional_special_tokens" in found:
            where = f"{path}: additional_special_tokens"
            self.settings["additional_special_tokens"] = _list_of_tokens(found["additional_special_tokens"], where)

    def _take_roles(self, found: Mapping[str, Any], where: str, *, special: bool | None, are_all: bool = False) -> None:
        for name, value in found.items():
            if not (are_all or name.endswith("_token")) or isinstance(value, bool):
                continue
            if value is None:
                self.roles[name] = None
            elif isinstance(value, (str, dict)):
                self.roles[name] = value if isinstance(value, str) else added_token(value, where, special=special)
            elif name in STANDARD_ROLES or are_all:
                raise DataError(f"{where}: {name} is {str(value)[:60]}; expected a text or an object of a token.")

    def _tokens_of(self, name: str) -> Iterator[str | AddedToken]:
        for each in _list_of_tokens(self.settings.get(name), f"{self.where}: {name}"):
            if not isinstance(each, (str, dict, AddedToken)):
                raise DataError(f"{self.where}: {name} has {str(each)[:60]}; expected texts or objects of tokens.")
            yield added_token(each, self.where, special=True) if isinstance(each, dict) else each

    def _list(self, number: Any, token: AddedToken, found: dict[str, AddedToken], where: str) -> None:
        if isinstance(number, str) and number.isascii() and number.isdecimal() and len(number) < 12:
            number = int(number)
        if type(number) is not int or not 0 <= number < 1 << 31:
            raise DataError(
                f"{where}: the added token {str(token)[:40]!r} has the id {str(number)[:40]!r}, which is none."
            )
        self.by_id[number] = found[str(token)] = token

    def _object(self, value: Any, name: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise DataError(f"{self.where}: {name} is {str(value)[:60]}; expected an object.")
        return value


def _list_of_tokens(value: Any, where: str) -> list[Any]:
    """The value of a setting that is a list or null; DataError for anything else."""
    if value is not None and not isinstance(value, list):
        raise DataError(f"{where} is {str(value)[:60]}; expected a list of tokens.")
    return value or []


def added_token(value: Any, where: str, *, special: bool | None) -> AddedToken:
    """A token outside the vocabulary as the library has it. ``special``: overrides what ``value`` says."""
    content = value.get("content") if isinstance(value, dict) else None
    flags = {name: value[name] for name in _FLAGS if name in value} if isinstance(content, str) else {}
    if not isinstance(content, str) or not all(isinstance(flag, bool) for flag in flags.values()):
        raise DataError(
            f'{where} describes a token as {str(value)[:80]}; expected an object with "content" and true or false.'
        )
    return _token(content, where, **(flags if special is None else {**flags, "special": special}))


def _token(content: str, where: str, **flags: bool) -> AddedToken:
    """A token of the library; DataError for a spelling that is no text."""
    try:
        return AddedToken(content, **flags)
    except UnicodeEncodeError:  # JSON can spell half a pair of surrogates
        raise DataError(f"{where} describes the token {ascii(content)[:80]}, which is not a text.") from None


def _read(path: Path) -> dict[str, Any]:
    """A file of settings or a vocabulary; empty where there is none."""
    if not has_file(path, error=DataError):
        return {}
    found: dict[str, Any] = read_json(path, dict[str, Any], error=DataError, most_bytes=VOCABULARY_BYTES)
    return found
