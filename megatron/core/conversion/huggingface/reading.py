"""A Hugging Face model folder as a portable model: config.json, and weights in safetensors or pytorch_model.bin."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.config.tokenizer import TokenizerConfig
from megatron.core.checkpointing.torch_files import load_torch_file
from megatron.core.conversion.companions import companions_in, tokenizer_in
from megatron.core.conversion.huggingface.format import format_of, model_from_config
from megatron.core.conversion.portable import LazyTensor, PortableModel, refuse_more_layers
from megatron.core.conversion.tables import matches, to_ours
from megatron.core.files.remote_path import AnyPath
from megatron.errors import CheckpointError
from megatron.small_files import VOCABULARY_BYTES, as_kind, read_json

CONFIG = "config.json"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_huggingface(folder: Path) -> PortableModel:
    """The model in ``folder``; of its weights only names, shapes and types are read now.

    Raises CheckpointError for a folder that isn't one, a family or setting that can't be converted, and tensors that
    don't fit the settings.
    """
    portable = _portable(read_config(folder), tensors_in(folder), str(folder), settings=str(folder / CONFIG))
    tokenizer = tokenizer_in(folder, rows=portable.model.vocab_size or 0)
    return replace(portable, tokenizer=tokenizer, companions=companions_in(folder))


def from_transformers(model: Any) -> PortableModel:
    """A model that the transformers library holds in memory; tensors are shared with it, not copied.

    The model brings no tokenizer, so ids are used as numbers. Raises CheckpointError as ``read_huggingface``.
    """

    def shared(tensor: Tensor) -> LazyTensor:
        return LazyTensor(tuple(tensor.shape), tensor.dtype, lambda: tensor.detach())

    tensors = {name: shared(tensor) for name, tensor in model.state_dict().items()}
    where = type(model).__name__
    return _portable(json.loads(model.config.to_json_string()), tensors, where, settings=f"{where}.config")


def _portable(config: dict[str, Any], tensors: dict[str, LazyTensor], where: str, *, settings: str) -> PortableModel:
    """The model of these settings and tensors, with ids for a tokenizer. ``where``, ``settings``: names in messages."""
    model = model_from_config(config, where=settings)
    model_type = config["model_type"]
    published = format_of(model_type)
    assert published is not None, "its settings were read"
    theirs = _as_today(tensors, published.types[model_type].prefix, heads=published.heads)
    model = published.complete(model, theirs)
    known = published.known(config, where=settings)
    groups = published.groups_from_config(known, theirs, where=settings)
    refuse_more_layers(model, groups, theirs, where=settings)
    found = matches(published.table(model_type, model), model, groups, where=where)
    wanted = {name for match in found for name in match.theirs}

    def ignored(name: str) -> bool:
        return published.is_unused(name) or (name in published.tied_copies and name not in wanted)

    return PortableModel(
        model=model,
        groups=groups,
        tensors=to_ours(found, theirs, model, where=where, ignored=ignored),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=(model.vocab_size or 1) - 1),
        seq_length=min(model.max_position_embeddings, 4096),
    )


def read_config(folder: AnyPath) -> dict[str, Any]:
    """``config.json`` of a model folder."""
    path = folder / CONFIG
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder: give the folder of a Hugging Face model")
    try:
        config: dict[str, Any] = read_json(path, dict[str, Any], error=CheckpointError)
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} has no {CONFIG}, so it is not a Hugging Face model: give the folder that "
            "`hf download NAME --local-dir FOLDER` made"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from None
    return config


def tensors_in(folder: Path) -> dict[str, LazyTensor]:
    """Every tensor of the folder's weight files, by their names; safetensors where there are both kinds."""
    for single, read in (("model.safetensors", _safetensors), ("pytorch_model.bin", _torch_bin)):
        files = _weight_files(folder, single)
        if files:
            return {name: tensor for file in files for name, tensor in read(file)}
    raise CheckpointError(f"{folder} holds no model.safetensors or pytorch_model.bin, whole or in parts with an index")


def _weight_files(folder: Path, single: str) -> list[Path]:
    index = folder / f"{single}.index.json"
    if (folder / single).exists():
        return [folder / single]
    if not index.exists():
        return []
    try:
        found = read_json(index, dict[str, Any], error=CheckpointError, most_bytes=VOCABULARY_BYTES)
    except OSError as error:
        raise CheckpointError(f"{index} cannot be read ({error.strerror})") from None
    weights = as_kind(found.get("weight_map"), dict[str, str], where=f"{index}: weight_map", error=CheckpointError)
    held = {path.name for path in folder.iterdir() if path.is_file()}
    missing = sorted(set(weights.values()) - held)
    if missing or not weights:
        named = ", ".join(map(repr, missing[:6])) or "no files at all"
        raise CheckpointError(f"{index} names files that are not in the folder: {named}")
    return [folder / name for name in sorted(set(weights.values()))]


def _safetensors(path: Path) -> Iterator[tuple[str, LazyTensor]]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise CheckpointError(
            f"{path} is read with safetensors, which is not installed: pip install safetensors"
        ) from None
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (it is no mapping)
                view = file.get_slice(name)
                if view.get_dtype() not in _DTYPES:
                    kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES.values())
                    raise CheckpointError(f"{path}: {name} is of type {view.get_dtype()}; weights are {kinds}")
                yield name, LazyTensor(tuple(view.get_shape()), _DTYPES[view.get_dtype()], partial(_read, path, name))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or incomplete ({error})") from None


def _read(path: Path, name: str) -> Tensor:
    """A tensor of a file that is opened anew, so that pages read before are given back."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
        return tensor


def _torch_bin(path: Path) -> Iterator[tuple[str, LazyTensor]]:
    content = load_torch_file(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not named tensors")
    for name, tensor in content.items():
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{path}: {name} is not a tensor")
        yield str(name), LazyTensor(tuple(tensor.shape), tensor.dtype, tensor.detach)


def _as_today(tensors: dict[str, LazyTensor], prefix: str, *, heads: tuple[str, ...]) -> dict[str, LazyTensor]:
    """Names as today's language model has them: the bare model's lack its prefix, and TensorFlow's norms had others."""
    whole = any(name.startswith(prefix) for name in tensors)
    renamed: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        today = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        renamed[today if whole or today.startswith(heads) else f"{prefix}{today}"] = tensor
    return renamed
