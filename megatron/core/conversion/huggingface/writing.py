"""A portable model as a folder that transformers loads: config.json, safetensors in parts, tokenizer files."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from megatron.config.model import ModelConfig
from megatron.core.conversion.chat_files import GENERATION, write_chat
from megatron.core.conversion.companions import (
    GPT2_SETTINGS,
    TOKENIZER_FILES,
    copy_files,
    text_tokenizer_of,
    tokenizer_of,
)
from megatron.core.conversion.huggingface.formats import config_from_model, format_for
from megatron.core.conversion.huggingface.quantizing import Rounding, chosen
from megatron.core.conversion.huggingface.reading import CONFIG, read_config
from megatron.core.conversion.portable import LazyTensor, PortableModel
from megatron.core.conversion.tables import Match, matches, to_theirs
from megatron.core.models.registry import family_of
from megatron.errors import CheckpointError

_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_NAMES |= {torch.int64: "I64", torch.int32: "I32", torch.int8: "I8", torch.float8_e4m3fn: "F8_E4M3", torch.uint8: "U8"}
_ALIGNMENT = 8
_INDEX = "model.safetensors.index.json"


def write_huggingface(
    portable: PortableModel, folder: Path, *, max_shard_size: int, rounding: Rounding | None = None
) -> None:
    """Write the model into the new ``folder``, each weight file of at most ``max_shard_size`` bytes (or one tensor).

    ``rounding``: how weights are quantized; a model that is quantized keeps its codes. Raises CheckpointError for an
    architecture that no family has, ConfigError for what can't be quantized so, both before anything is written.
    """
    theirs, config = format_for(portable.groups), published_config(portable)
    found = theirs_of(portable.model, portable.groups, config["model_type"])
    tensors = to_theirs(found, portable.tensors, portable.model)
    in_few_bits = chosen(found, tensors, portable, rounding, config["model_type"])
    folder.mkdir(parents=True)
    if in_few_bits is not None:
        tensors = in_few_bits.stored(tensors, portable.dtype)
        config |= in_few_bits.settings()
        in_few_bits.write_for_modelopt(folder)
    write_settings(portable, config, folder)
    theirs.write_files(portable.groups, config["model_type"], folder, tokenizer=tokenizer_of(portable.tokenizer))
    copies = theirs.types[config["model_type"]].copies(portable.model)
    tensors |= {copy: tensors[original] for copy, original in copies.items()}
    _write_weights(tensors, folder, max_shard_size)


def published_config(portable: PortableModel) -> dict[str, Any]:
    """The model's config.json; CheckpointError for an architecture that no family has."""
    source = read_config(path.parent) if (path := portable.companions.get(CONFIG)) else {}
    dtype = str(portable.dtype).removeprefix("torch.")
    tokens = dict[str, Any]()
    if (tokenizer := tokenizer_of(portable.tokenizer)) is not None:
        tokens = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eod, "pad_token_id": tokenizer.pad}
        tokens |= format_for(portable.groups).special_tokens(tokenizer)
    return config_from_model(portable.model, portable.groups, dtype=dtype, source=source, tokens=tokens)


def write_settings(portable: PortableModel, config: Mapping[str, Any] | None, folder: Path) -> None:
    """Write what is beside weights: the ``config``, where there is one, the tokenizer's files, how texts end and
    conversations look.
    """
    if config is not None:
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    along = (GENERATION, *TOKENIZER_FILES)
    copy_files({name: path for name, path in portable.companions.items() if name in along}, folder)
    _name_pieces(portable, folder)
    _say_class(portable, folder)
    continues = family_of(portable.groups).train_spec.continues_texts
    write_chat(portable.chat, folder, text_tokenizer_of(portable.tokenizer), continues_texts=continues)


def published_form(portable: PortableModel, *, wanted: Sequence[str]) -> tuple[str, dict[str, LazyTensor]]:
    """The published type that the model is written as, and its tensors there, without those that are held twice.

    It is the source's, or the first of those ``wanted`` that the model fits, or another. Raises CheckpointError for an
    architecture that no family has.
    """
    own = read_config(path.parent).get("model_type") if (path := portable.companions.get(CONFIG)) else None
    model_type = fitting_type(portable.model, portable.groups, wanted=[*([own] if own else ()), *wanted])
    found = theirs_of(portable.model, portable.groups, model_type)
    return model_type, to_theirs(found, portable.tensors, portable.model)


def fitting_type(model: ModelConfig, groups: Sequence[object], *, wanted: Sequence[str]) -> str:
    """The first of the published types ``wanted`` that a model is of, or another; CheckpointError if there is none."""
    found = ""
    for each in wanted:
        config = config_from_model(model, groups, dtype="float32", source={"model_type": each}, tokens={})
        found = config["model_type"]
        if found == each:
            return each
    return found


def check_writable(model: ModelConfig, groups: Sequence[object]) -> None:
    """Raise CheckpointError for a model that ``write_huggingface`` would refuse. ``groups`` identify its family."""
    model = dataclasses.replace(model, vocab_size=model.vocab_size or 1)
    config = config_from_model(model, groups, dtype="float32", source={}, tokens={})
    theirs_of(model, groups, config["model_type"])


def theirs_of(model: ModelConfig, groups: Sequence[object], model_type: str) -> list[Match]:
    """The matches of a model's parameters with the tensors of a folder of ``model_type``."""
    table = format_for(groups).table(model_type, model, groups)
    return matches(table, model, groups, where=f"a {model_type} model")


def _say_class(portable: PortableModel, folder: Path) -> None:
    """Say what reads GPT-2's vocabulary and merges, for transformers: the model's type alone doesn't."""
    path = folder / "tokenizer_config.json"
    if portable.tokenizer.tokenizer_type == "GPT2BPETokenizer" and not path.exists():
        path.write_text(json.dumps(GPT2_SETTINGS, indent=2) + "\n", encoding="utf-8")


def _name_pieces(portable: PortableModel, folder: Path) -> None:
    """Give a WordPiece vocabulary the name that transformers looks for, and say how letters are read."""
    tokenizer = portable.tokenizer
    if tokenizer.vocab_file is None or not tokenizer.tokenizer_type.startswith("BertWordPiece"):
        return
    pieces = Path(tokenizer.vocab_file)
    if pieces.suffix != ".json" and pieces.is_file():
        shutil.copyfile(pieces, folder / "vocab.txt")
    if not (folder / "tokenizer_config.json").exists():
        lower_case = tokenizer.tokenizer_type == "BertWordPieceLowerCase"
        settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": lower_case}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _write_weights(tensors: Mapping[str, LazyTensor], folder: Path, max_shard_size: int) -> None:
    """One file, or an index and parts of at most ``max_shard_size`` bytes each (or one tensor that is larger)."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + _nbytes(tensor) > max_shard_size:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += _nbytes(tensor)
    if len(shards) == 1:
        write_safetensors(tensors, folder / "model.safetensors")
        return
    homes: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors({name: tensors[name] for name in names}, folder / file)
        homes |= dict.fromkeys(names, file)
    total = sum(_nbytes(tensor) for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": homes}
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_safetensors(tensors: Mapping[str, LazyTensor], path: Path) -> None:
    """A safetensors file, one tensor in memory at a time.

    They are made in the given order, so that codes and scales of a weight are made together.
    """
    with SafetensorsFile(path, tensors) as file:
        for name, tensor in tensors.items():
            file.put(name, tensor.make())


class SafetensorsFile:
    """A safetensors file that is filled in any order: its header needs only shapes and types.

    The library's own writer wants all tensors of a file at once. Format: the header's length in 8 bytes, the header in
    JSON padded with spaces to a multiple of 8, the tensors' bytes; wide numbers first, so that all are aligned.
    """

    def __init__(self, path: Path, tensors: Mapping[str, LazyTensor | Tensor]) -> None:
        """Write the header for ``tensors``, by their shapes and types; CheckpointError for a type that files lack."""
        aligned = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
        self._tensors, self._places = tensors, dict[str, int]()
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name, tensor in aligned.items():
            if tensor.dtype not in _NAMES:
                raise CheckpointError(f"{name} is of type {tensor.dtype}, which weight files don't have")
            end = at + _nbytes(tensor)
            header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
            self._places[name], at = at, end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._start = 8 + len(text)
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def put(self, name: str, made: Tensor) -> None:
        """Write one of the tensors."""
        wanted = self._tensors[name]
        assert (tuple(made.shape), made.dtype) == (tuple(wanted.shape), wanted.dtype), f"{name} is another tensor"
        self._file.seek(self._start + self._places.pop(name))
        self._file.write(made.detach().contiguous().view(-1).view(torch.uint8).numpy().data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._file.close()
        assert kind is not None or not self._places, f"{next(iter(self._places))} was not written"


def _nbytes(tensor: LazyTensor | Tensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize
