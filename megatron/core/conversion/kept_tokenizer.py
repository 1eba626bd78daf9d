"""The tokenizer's files inside each checkpoint, so that a checkpoint folder is enough to use the model.

They have fixed names, whatever they were called where training read them. Paths in saved settings are only used for
checkpoints without these files.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.config.tokenizer import TokenizerConfig
from megatron.core.files.remote_path import AnyPath, RemotePath
from megatron.core.tokenizers.published.vocabularies import VOCABULARY_FILES
from megatron.errors import CheckpointError
from megatron.small_files import read_bytes

logger = logging.getLogger(__name__)

FOLDER = "tokenizer"
LARGEST_KEPT = 1 << 26
"""Bytes of a file beyond which it isn't kept; those of known tokenizers have up to 35 million."""
_WORDPIECE = {"vocab_file": ("vocab.txt", "tokenizer.json")}
_MODEL = {"tokenizer_model": ("tokenizer.model",)}
# The names that files of each kind have in a checkpoint; of several names, the one with the file's suffix.
_NAMES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "GPT2BPETokenizer": {"vocab_file": ("vocab.json",), "merge_file": ("merges.txt",)},
    "BertWordPieceLowerCase": _WORDPIECE,
    "BertWordPieceCase": _WORDPIECE,
    "SentencePieceTokenizer": _MODEL,
    "GPTSentencePieceTokenizer": _MODEL,
    "Llama2Tokenizer": _MODEL,
    "TikTokenizer": {"tokenizer_model": ("tokenizer.tiktoken",)},
}
_HUGGING_FACE = "HuggingFaceTokenizer"
# What says how the vocabulary of a folder is used; config.json by the model's type.
_SETTINGS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "config.json",
)
_WHOLE = "tokenizer.json"


def files_to_keep(config: TokenizerConfig) -> dict[str, bytes]:
    """The tokenizer's files by their names in a checkpoint; warns and gives none if one is too large or unreadable."""
    sources: dict[str, Path] = {}
    for field, names in _NAMES.get(config.tokenizer_type, {}).items():
        path = Path(getattr(config, field))
        sources[next((name for name in names if Path(name).suffix == path.suffix), names[0])] = path
    if config.tokenizer_type == _HUGGING_FACE:
        sources = _of_a_folder(Path(config.tokenizer_model or ""))
    try:
        return {
            f"{FOLDER}/{name}": read_bytes(path, where=str(path), error=CheckpointError, most_bytes=LARGEST_KEPT)
            for name, path in sources.items()
        }
    except (OSError, CheckpointError) as error:
        logger.warning("checkpoints will not contain the tokenizer; keep its files: %s", error)
        return {}


def _of_a_folder(given: Path) -> dict[str, Path]:
    """The files that determine a Hugging Face tokenizer, by name; ``given``: its folder, or a file in it."""
    folder = given if given.is_dir() else given.parent
    whole = folder / _WHOLE if given.is_dir() or given.name in VOCABULARY_FILES else given
    names = _SETTINGS if whole.is_file() else (*_SETTINGS, *VOCABULARY_FILES)
    found = {name: folder / name for name in names if (folder / name).is_file()}
    return {**found, _WHOLE: whole} if whole.is_file() else found


def kept_files(tokenizer: Mapping[str, Any], folder: AnyPath) -> dict[str, str]:
    """The settings of a saved ``tokenizer`` that name files, as those that the checkpoint ``folder`` keeps; empty where
    it keeps none. From object storage they are copied to the user's cache first.
    """
    kind, own = tokenizer.get("tokenizer_type"), folder / FOLDER
    is_folder = kind == _HUGGING_FACE
    wanted = {"tokenizer_model": (_WHOLE, *VOCABULARY_FILES)} if is_folder else _NAMES.get(str(kind), {})
    found = {field: [own / name for name in names if (own / name).is_file()] for field, names in wanted.items()}
    if not wanted or not all(found.values()):
        return {}
    if isinstance(own, RemotePath):
        own = _copied(own)
    if is_folder:
        return {"tokenizer_model": str(own)}
    return {field: str(own / paths[0].name) for field, paths in found.items()}


def with_kept_files(config: TokenizerConfig, folder: AnyPath) -> TokenizerConfig:
    """The tokenizer's settings with the files that the checkpoint ``folder`` keeps, where it does."""
    kept: dict[str, Any] = {**kept_files({"tokenizer_type": config.tokenizer_type}, folder)}
    return dataclasses.replace(config, **kept)


def _copied(folder: RemotePath) -> Path:
    """A folder of object storage on this machine. No two checkpoints there have one name, so it is copied once."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron" / "tokenizers"
    local = cache / hashlib.sha256(str(folder).encode()).hexdigest()[:32]
    local.mkdir(parents=True, exist_ok=True)
    for name in folder.sizes_below():
        if not (local / name).exists():
            aside = local / f".{name}.{os.getpid()}"
            (folder / name).copy_to(aside)
            aside.replace(local / name)
    return local
