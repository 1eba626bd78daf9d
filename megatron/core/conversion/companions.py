"""Files that travel with the weights: the tokenizer's, and Hugging Face's settings beside them."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megatron.config.tokenizer import TokenizerConfig
from megatron.core.files.remote_path import AnyPath, RemotePath
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.build import build_tokenizer
from megatron.core.tokenizers.gpt2_bpe import END_OF_TEXT
from megatron.core.tokenizers.published.classes import AS_WRITTEN, is_plain
from megatron.core.tokenizers.published.folder import folder_class
from megatron.core.tokenizers.published.vocabularies import VOCABULARY_FILES, has_vocabulary
from megatron.errors import CheckpointError, DataError, MegatronError, exit_code_of
from megatron.small_files import VOCABULARY_BYTES, check_kinds, has_file, read_json

FOLDER = "huggingface"
"""Folder beside converted checkpoints that keeps these files."""

# What makes more of a vocabulary than its pieces.
_SAYS_MORE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
GPT2_SETTINGS = {
    "tokenizer_class": "GPT2Tokenizer",
    **dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT),
}
"""tokenizer_config.json beside the files of GPT2BPETokenizer, by which transformers' AutoTokenizer reads them."""
TOKENIZER_FILES = ("tokenizer.json", *_SAYS_MORE, *VOCABULARY_FILES, "chat_template.jinja")
SETTINGS = ("config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json")
_has = partial(has_file, error=CheckpointError)
_WEIGHTS_ALONE = "take the tokenizer's files out of the folder to convert the weights alone"


def companions_in(folder: AnyPath) -> dict[str, AnyPath]:
    """The files of ``folder`` that travel along, by name."""
    return {name: folder / name for name in (*TOKENIZER_FILES, *SETTINGS) if _has(folder / name)}


def tokenizer_in(folder: Path, *, rows: int) -> TokenizerConfig:
    """How the tokenizer in ``folder`` is built; one that uses ids as numbers where there is none.

    ``rows``: of the model's embedding, which is often larger than the tokenizer's vocabulary. Raises CheckpointError
    for a tokenizer that cannot be built, or has more ids.
    """
    try:
        config = _settings_in(folder, rows=rows)
        size = rows if config.tokenizer_type == "NullTokenizer" else build_tokenizer(config).vocab_size
    except DataError as error:
        raise CheckpointError(f"{str(error).rstrip('.')}; or {_WEIGHTS_ALONE}") from None
    if size > rows:
        raise CheckpointError(
            f"the tokenizer in {folder} has {size} ids and the model embeds {rows}: take the added tokens out of the "
            f"tokenizer's files, or {_WEIGHTS_ALONE}"
        )
    return config


def _settings_in(folder: Path, *, rows: int) -> TokenizerConfig:
    """Settings by which the tokenizer in ``folder`` is built, without trying it."""
    settings: dict[str, Any]
    if (pieces := _wordpiece_file(folder)) is not None:
        kind = "BertWordPieceLowerCase" if _is_lower_case(folder) else "BertWordPieceCase"
        settings = {"tokenizer_type": kind, "vocab_file": str(pieces)}
    elif _is_published(folder):
        settings = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder)}
    elif _has(folder / "tokenizer.model"):
        settings = {"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": str(folder / "tokenizer.model")}
    elif _has(folder / "spiece.model"):
        settings = {"tokenizer_type": "GPTSentencePieceTokenizer", "tokenizer_model": str(folder / "spiece.model")}
    elif _has(folder / "vocab.json") and _has(folder / "merges.txt"):
        files = {"vocab_file": str(folder / "vocab.json"), "merge_file": str(folder / "merges.txt")}
        settings = {"tokenizer_type": "GPT2BPETokenizer", **files}
    else:
        return TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=rows - 1)
    return TokenizerConfig(**settings, vocab_size=rows)


def _is_published(folder: Path) -> bool:
    """Whether the folder says how its vocabulary is used: by a tokenizer.json, settings, or the type of its model.

    Llama's tokenizer.model and GPT-2's vocab.json alone are those of Llama2Tokenizer and GPT2BPETokenizer.
    """
    if _has(folder / "tokenizer.json"):
        return True
    if not any(_has(folder / name) for name in TOKENIZER_FILES):
        return False
    tokenizer_class = folder_class(folder)
    if not has_vocabulary(folder, tokenizer_class):
        return False
    more = [name for name in _SAYS_MORE if _has(folder / name)]
    if more == ["tokenizer_config.json"] and _json(folder / more[0], {}) == GPT2_SETTINGS:
        return False
    if more or not is_plain(tokenizer_class):
        return True
    return tokenizer_class != AS_WRITTEN and END_OF_TEXT not in _json(folder / "vocab.json", {})


def _wordpiece_file(folder: Path) -> Path | None:
    """A WordPiece vocabulary in a folder: the list of its pieces, or the file that holds it with more."""
    if _has(folder / "vocab.txt"):
        return folder / "vocab.txt"
    path = folder / "tokenizer.json"
    return path if (_json(path, {"model": dict[str, Any]}).get("model") or {}).get("type") == "WordPiece" else None


def _is_lower_case(folder: Path) -> bool:
    """Whether the tokenizer lowers letters, which is WordPiece's default."""
    normalizer = _json(folder / "tokenizer.json", {"normalizer": dict[str, Any]}).get("normalizer") or {}
    settings = _json(folder / "tokenizer_config.json", {"do_lower_case": bool})
    return bool(settings.get("do_lower_case", normalizer.get("lowercase", True)))


def _json(path: Path, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """The file's settings, some of the given ``kinds``; none where it is missing, and CheckpointError where it is
    damaged.
    """
    if not _has(path):
        return {}
    found: dict[str, Any] = read_json(path, dict[str, Any], error=CheckpointError, most_bytes=VOCABULARY_BYTES)
    check_kinds(found, kinds, where=str(path), error=CheckpointError)
    return found


def copied_tokenizer(config: TokenizerConfig, folder: AnyPath) -> TokenizerConfig:
    """The tokenizer's settings with its files where ``folder`` will have them."""
    if isinstance(folder, Path):
        folder = folder.resolve()

    named = {field: getattr(config, field) for field in ("tokenizer_model", "vocab_file", "merge_file")}
    moved: dict[str, Any] = {field: str(folder / Path(path).name) for field, path in named.items() if path is not None}
    if config.tokenizer_type == "HuggingFaceTokenizer":
        moved["tokenizer_model"] = str(folder)
    return dataclasses.replace(config, **moved)


def tokenizer_of(config: TokenizerConfig) -> Tokenizer | None:
    """The tokenizer, or None where its files are missing: a model converts without one."""
    try:
        return build_tokenizer(config)
    except MegatronError:
        return None


def text_tokenizer_of(config: TokenizerConfig) -> Tokenizer | None:
    """The tokenizer of text, or None where its files are missing or it uses ids as numbers: no such id is known to end
    a text.
    """
    return None if config.tokenizer_type == "NullTokenizer" else tokenizer_of(config)


def tokenizer_files(config: TokenizerConfig) -> dict[str, AnyPath]:
    """The files of a tokenizer that are where its settings say, by name; settings beside them go along."""
    found: dict[str, AnyPath] = {}
    for name in filter(None, (config.tokenizer_model, config.vocab_file, config.merge_file)):
        path = Path(name)
        beside = companions_in(path if path.is_dir() else path.parent)
        if path.is_file():
            found[path.name] = path
            beside = {name: file for name, file in beside.items() if config.tokenizer_type == "HuggingFaceTokenizer"}
        found |= beside
    return found


def copy_files(files: Mapping[str, AnyPath], folder: Path) -> None:
    """Copy the files into ``folder``, which is made if there are any; CheckpointError names the one that can't be."""
    for name, path in files.items():
        folder.mkdir(parents=True, exist_ok=True)
        try:
            if isinstance(path, RemotePath):
                path.copy_to(folder / name)
            else:
                shutil.copyfile(path, folder / name)
        except OSError as error:
            elsewhere = error.filename not in (None, str(path))
            reason = f"{error.filename}: {error.strerror}" if elsewhere else error.strerror or error
            said = f"{path} cannot be copied to the result: {reason}"
            raise CheckpointError(said, exit_code=exit_code_of(error)) from error
