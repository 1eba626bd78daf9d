"""How a model writes conversations and ends its answers, in Hugging Face's files: read from them, and written to them.

``eos_token_id`` of generation_config.json, or else of config.json, is an id or a list of ids, each of which ends a
text.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron.config.tokenizer import TokenizerConfig
from megatron.core.checkpointing.find import CheckpointFolder
from megatron.core.checkpointing.load import CHAT
from megatron.core.conversion.companions import FOLDER, companions_in, text_tokenizer_of
from megatron.core.files.remote_path import AnyPath
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.chat_settings import ChatSettings
from megatron.core.tokenizers.conversations import own_template
from megatron.core.tokenizers.end_tokens import own_ends
from megatron.errors import CheckpointError, exit_code_of
from megatron.small_files import as_kind, has_file, read_json, shown

GENERATION, _CONFIG, _TEMPLATE = "generation_config.json", "config.json", "chat_template.jinja"
_ENDS = "eos_token_id"
# Settings of generation_config.json that change texts, and their values that don't; the first only where it samples.
_SAMPLING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
_PROCESSING = {
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
    "bad_words_ids": [],
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "sequence_bias": None,
}


def read_chat(
    files: Mapping[str, AnyPath], tokenizer: TokenizerConfig, *, rows: int
) -> tuple[ChatSettings | None, tuple[str, ...]]:
    """Settings that the ``files`` of a folder, by name, hold beside those of its ``tokenizer``, and notes for the user.

    ``rows``: ids of the model. None where there are no such settings: the tokenizer's own end and the template that
    its own files hold are not among them. Raises CheckpointError for ``eos_token_id`` that is neither an id nor a list.
    """
    ids, where = stored_ends(files)
    notes = []
    if beyond := [each for each in ids if not 0 <= each < rows]:
        notes.append(
            f"note: {where}: {_ENDS} has {', '.join(map(str, beyond))}, and the model's ids are 0 to {rows - 1}: "
            "no text ends with it"
        )
    known = text_tokenizer_of(tokenizer)
    ends = {each for each in ids if 0 <= each < rows}.difference(() if known is None else own_ends(known))
    template = _template(files, tokenizer)
    if asked := _asked_of_generation(files):
        notes.append(
            f"note: {files[GENERATION]} asks for {', '.join(asked)}: transformers does so by default; generation here "
            "takes such settings from flags and requests alone"
        )
    if not ends and template is None:
        return None, tuple(notes)
    return ChatSettings(template=template, end_tokens=tuple(sorted(ends))), tuple(notes)


def chat_of_checkpoint(
    folder: CheckpointFolder, state: Mapping[str, Any], tokenizer: TokenizerConfig
) -> ChatSettings | None:
    """Settings that a checkpoint keeps in the ``state`` of its run; for one that was saved before runs kept them, those
    of the published model that it comes from, whose files are beside it. ``tokenizer``: the checkpoint's.
    """
    rows = state["config"]["model"].get("vocab_size") or sys.maxsize  # runs of long ago don't say
    if CHAT not in state:
        files = companions_in(folder.path.parent / FOLDER)
        return read_chat(files, tokenizer, rows=rows)[0] if files else None
    where = f"{folder.path}: {CHAT}"
    found: ChatSettings | None = as_kind(state[CHAT], ChatSettings | None, where=where, error=CheckpointError)
    wrong = next((each for each in found.end_tokens if not 0 <= each < rows), None) if found else None
    if wrong is not None:
        raise CheckpointError(
            f"{where}: end_tokens has {wrong}, and the model's ids are 0 to {rows - 1}: it is damaged"
        )
    return found


def chat_entry(chat: ChatSettings | None) -> dict[str, Any] | None:
    """Settings as the state of a run holds them."""
    return None if chat is None else dataclasses.asdict(chat)


def stored_ends(files: Mapping[str, AnyPath]) -> tuple[list[int], str]:
    """The ids of ``eos_token_id`` in their order, none where no file has any, and the name of the file."""
    for name in (GENERATION, _CONFIG):
        if (path := files.get(name)) is None:
            continue
        settings = _settings(path)
        text = settings.get("text_config")
        for part in (settings, text if isinstance(text, dict) else {}):
            if part.get(_ENDS) is not None:
                return ids_of(part[_ENDS], where=f"{path}: {_ENDS}"), str(path)
    return [], ""


def ids_of(value: Any, *, where: str) -> list[int]:
    """``eos_token_id`` as a list; CheckpointError for anything but an id, a list of ids or null."""
    if value is None:
        return []
    found = as_kind(value, int | list[int], where=where, error=CheckpointError)
    return list(dict.fromkeys(found)) if isinstance(found, list) else [found]


def write_chat(chat: ChatSettings | None, folder: Path, tokenizer: Tokenizer | None, *, continues_texts: bool) -> None:
    """Complete the written model in ``folder``: transformers ends texts where they end here, and knows the template.

    Ids that the files have already keep their order, and stand before further ones. ``tokenizer``: of the model; None
    where its ids are numbers. ``continues_texts``: whether its texts end at the tokenizer's own end.
    """
    folder.mkdir(exist_ok=True)
    if chat is not None and chat.template is not None and own_template(str(folder)) != chat.template:
        (folder / _TEMPLATE).write_text(chat.template, encoding="utf-8")
    files = companions_in(folder)
    there, _ = stored_ends(files)
    own = [] if tokenizer is None or not continues_texts else sorted(own_ends(tokenizer), key=tokenizer.eod.__ne__)
    ends = list(dict.fromkeys([*there, *own, *(chat.end_tokens if chat else ())]))
    if len(ends) == len(there):
        return
    path = files.get(GENERATION)
    settings = _generation_of(folder) if path is None else _settings(path)
    settings.pop("_from_model_config", None)  # with it, some versions take config.json's settings instead
    settings[_ENDS] = ends if len(ends) > 1 else ends[0]
    (folder / GENERATION).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _settings(path: AnyPath) -> dict[str, Any]:
    try:
        found: dict[str, Any] = read_json(path, dict[str, Any], error=CheckpointError)
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"{path} cannot be read ({reason})", exit_code=exit_code_of(error)) from error
    return found


def _generation_of(folder: Path) -> dict[str, Any]:
    """What transformers takes from a config.json that has no generation_config.json beside it."""
    path = folder / _CONFIG
    config = _settings(path) if has_file(path, error=CheckpointError) else {}
    names = ("bos_token_id", _ENDS, "pad_token_id", "decoder_start_token_id")
    return {name: config[name] for name in names if config.get(name) is not None}


def _template(files: Mapping[str, AnyPath], tokenizer: TokenizerConfig) -> str | None:
    """The chat template beside a tokenizer whose kind doesn't look for one."""
    beside = next((path.parent for path in files.values() if isinstance(path, Path)), None)
    if beside is None or tokenizer.tokenizer_type in ("HuggingFaceTokenizer", "NullTokenizer"):
        return None
    return own_template(str(beside))


def _asked_of_generation(files: Mapping[str, AnyPath]) -> Iterable[str]:
    if (path := files.get(GENERATION)) is None:
        return []
    settings = _settings(path)
    neutral = {**(_SAMPLING if settings.get("do_sample") else {}), **_PROCESSING}
    return [
        f"{name} {shown(settings[name])}"
        for name, value in neutral.items()
        if settings.get(name) is not None and settings[name] not in (value, None, False)
    ]
