"""A Hugging Face model folder as a portable model: config.json, and weights in safetensors or pytorch_model.bin."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.config.tokenizer import TokenizerConfig
from megatron.core.checkpointing.foreign import no_huggingface_model, other_weights
from megatron.core.checkpointing.manifest import listed
from megatron.core.checkpointing.torch_files import load_torch_file
from megatron.core.conversion.chat_files import ids_of, read_chat
from megatron.core.conversion.companions import companions_in, tokenizer_in, tokenizer_of
from megatron.core.conversion.huggingface.cache_scales import read_cache_scales
from megatron.core.conversion.huggingface.formats import as_published, format_of, model_from_config
from megatron.core.conversion.huggingface.nearest import unread
from megatron.core.conversion.huggingface.quantized import QUANTIZED, Widened, check_quantization, widened
from megatron.core.conversion.huggingface.quantized_weights import quantization_of
from megatron.core.conversion.portable import (
    LazyTensor,
    PortableModel,
    refuse_larger_weights,
    refuse_more_layers,
    refuse_out_of_bounds,
)
from megatron.core.conversion.tables import matches, to_ours
from megatron.core.files.remote_path import AnyPath
from megatron.core.models.registry import with_all_groups
from megatron.core.tokenizers.chat_settings import ChatSettings
from megatron.errors import CheckpointError
from megatron.small_files import VOCABULARY_BYTES, as_kind, check_regular, read_json

CONFIG = "config.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""Files of weights where they are whole; the first kind is read where there are both."""
_POINTER = b"version https://git-lfs.github.com/"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_huggingface(folder: Path) -> PortableModel:
    """The model in ``folder``; of its weights only names, shapes and types are read now.

    Raises CheckpointError for a folder that isn't one, a family or setting that can't be converted, and tensors that
    don't fit the settings.
    """
    config, settings = read_config(folder), str(folder / CONFIG)
    try:
        tensors = tensors_in(folder)
    except CheckpointError:
        model_from_config(config, where=settings)  # what is wrong with these goes first
        raise
    check_quantization(config, where=settings)
    found = widened(config, tensors, where=str(folder))
    portable = _portable(config, found, str(folder), settings=settings)
    tokenizer = tokenizer_in(folder, rows=portable.model.vocab_size or 0)
    notes = [*portable.notes, *found.note(str(folder))]
    if config.get("auto_map"):
        notes.append(
            f"note: {settings} names code of the model's own (auto_map), which is never executed: the model is read as "
            f"transformers' {config['model_type']}"
        )
    if tokenizer.tokenizer_type == "NullTokenizer" and (folder / "tokenizer_config.json").is_file():
        notes.append(f"note: {folder} has no tokenizer file that is read here: token ids are used as numbers")
    notes += [f"note: {remark}" for remark in getattr(tokenizer_of(tokenizer), "remarks", ())]
    files = companions_in(folder)
    published = format_of(config["model_type"])
    assert published is not None, "its settings were read"
    groups, said = published.groups_of_files(portable.groups, files)
    notes += said
    chat, more = read_chat(files, tokenizer, rows=portable.model.vocab_size or 0)
    return replace(portable, groups=groups, tokenizer=tokenizer, companions=files, chat=chat, notes=(*notes, *more))


def from_transformers(model: Any) -> PortableModel:
    """A model that the transformers library holds in memory; tensors are shared with it, not copied.

    The model brings no tokenizer, so ids are used as numbers. Raises CheckpointError as ``read_huggingface``.
    """

    def shared(tensor: Tensor) -> LazyTensor:
        return LazyTensor(tuple(tensor.shape), tensor.dtype, lambda: tensor.detach())

    config, where = json.loads(model.config.to_json_string()), type(model).__name__
    config.pop("quantization_config", None)  # dequantized, or its tensors' names are unknown
    published, parameters = format_of(config["model_type"]), dict(model.named_parameters(remove_duplicate=False))
    copies = published.types[config["model_type"]].tied_copies if published else ()
    uses = Counter(map(id, parameters.values()))
    tied = {name for name in copies if name in parameters and uses[id(parameters[name])] > 1}
    state: dict[str, Tensor] = model.state_dict()
    if any(".experts." in name for name in state):  # stacked in memory, and not in files
        from transformers.core_model_loading import revert_weight_conversion

        state = dict(revert_weight_conversion(model, state))
    tensors = {name: shared(tensor) for name, tensor in state.items() if name not in tied}
    ends = ids_of(model.generation_config.eos_token_id, where=f"{where}: eos_token_id") if model.can_generate() else []
    chat = ChatSettings(template=None, end_tokens=tuple(sorted(ends))) if ends else None
    return replace(_portable(config, Widened(tensors), where, settings=f"{where}.config"), chat=chat)


def _portable(config: dict[str, Any], widened: Widened, where: str, *, settings: str) -> PortableModel:
    """The model of these settings and tensors, with ids for a tokenizer. ``where``, ``settings``: names in messages."""
    tensors = widened.tensors
    model = model_from_config(config, where=settings, tensors=tensors)
    model_type = config["model_type"]
    published = format_of(model_type)
    assert published is not None, "its settings were read"
    described = published.types[model_type]
    names = described.current_names(tensors)
    theirs = described.as_released({today: tensors[name] for name, today in names.items()})
    model = published.complete(model, theirs)
    model = replace(model, mtp_num_layers=described.later_layers(model, theirs, where))
    reader = published.reader(config, where=settings)
    published.model_from_config(reader, model_type)
    groups = with_all_groups(published.groups_from_config(reader, theirs, where=settings))
    refuse_more_layers(model, groups, theirs, where=settings)
    refuse_out_of_bounds((model, *groups), described.settings, where=settings)
    refuse_larger_weights(model, groups, theirs, where=settings)
    found = matches(published.table(model_type, model, groups), model, groups, where=where)
    wanted = {name for match in found for name in match.theirs}
    copies = described.copies(model)

    def ignored(name: str) -> bool:
        is_copy = name in copies or (name in described.tied_copies and name not in wanted)
        return is_copy or published.is_unused(name, model_type, groups)

    for copy, original in copies.items():
        if copy in theirs and original in theirs and _digest(theirs[copy]) != _digest(theirs[original]):
            raise CheckpointError(f"{where}: {copy} differs from {original}, which it must be a copy of")
    _check_tied_copies(theirs, wanted, described.tied_copies, settings=settings)
    stored = {names[name]: each for name, each in widened.quantized.items()}
    cache = read_cache_scales(
        found, {described.current_names([name])[name]: each for name, each in widened.cache.items()}
    )
    quantization = quantization_of(
        stored, found, model, method=widened.method, rounds_inputs=widened.rounds_inputs, cache=cache
    )
    return PortableModel(
        model=model,
        groups=groups,
        tensors=to_ours(found, theirs, model, where=where, ignored=ignored),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=(model.vocab_size or 1) - 1),
        seq_length=min(model.max_position_embeddings, 4096),
        quantization=quantization,
        notes=(
            *_unread(
                config,
                {*reader.asked, *described.idle},
                described.older_settings,
                model_type=model_type,
                where=settings,
            ),
            *_mixed_types({name: theirs[name].dtype for name in wanted}, where=where),
            *_cache_note(widened.cache, kept=quantization is not None and bool(cache), where=where),
        ),
    )


def _unread(
    config: Mapping[str, Any], asked: Collection[str], older: Mapping[str, str], *, model_type: str, where: str
) -> tuple[str, ...]:
    """A note about settings that a model of this type hasn't: transformers skips them, other programs may not."""
    found = unread(config, {*asked, *(name for name, today in older.items() if today in asked)})
    if not found:
        return ()
    return (f"note: {where} has settings that are not read in a {model_type}: {listed(found)}",)


def _cache_note(scales: Collection[str], *, kept: bool, where: str) -> tuple[str, ...]:
    """A note about FP8 scales of keys and values, which this program doesn't round."""
    if not scales:
        return ()
    said = "quantized targets keep the scales" if kept else "no target keeps scales of this kind"
    return (f"note: {where} has scales of keys and values, which are not quantized here; {said}",)


def _mixed_types(dtypes: Mapping[str, torch.dtype], *, where: str) -> tuple[str, ...]:
    """A note about tensors of another type than most have. Published models have such, as routers' biases in fp32; in
    others it is an accident.
    """
    (most, count), *_ = Counter(dtypes.values()).most_common()
    others = [
        f"{name} is {str(dtype).removeprefix('torch.')}" for name, dtype in sorted(dtypes.items()) if dtype != most
    ]
    if not others:
        return ()
    return (
        f"note: {where} mixes types: {count} of {len(dtypes)} tensors are {str(most).removeprefix('torch.')}, but "
        f"{listed(others)}; a conversion keeps the type of each, and a run trains all in its own",
    )


def _check_tied_copies(
    theirs: Mapping[str, LazyTensor], wanted: Collection[str], copies: Collection[str], *, settings: str
) -> None:
    """Raise CheckpointError for a copy of a tied tensor that isn't one. Copies of equal shape alone are compared: the
    shapes of others are told with those of all tensors.
    """
    for name in sorted(theirs.keys() & {*copies} - {*wanted}):
        copy = theirs[name]
        alike = [other for other in wanted if other in theirs and theirs[other].shape == copy.shape]
        if alike and all(_digest(theirs[other]) != _digest(copy) for other in alike):
            raise CheckpointError(
                f"{settings} ties the output to the word embeddings (tie_word_embeddings), but {name} in the files "
                f"differs from {alike[0]}: if the output has weights of its own, set tie_word_embeddings to false"
            )


def _digest(tensor: LazyTensor) -> bytes:
    """Digest of the tensor's bytes; a function of its own, so that only one tensor is in memory at a time."""
    return hashlib.blake2b(tensor.make().contiguous().view(-1).view(torch.uint8).numpy().data).digest()


def read_config(folder: AnyPath) -> dict[str, Any]:
    """``config.json`` of a model folder, in transformers' settings."""
    path = folder / CONFIG
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a folder: give the folder of a Hugging Face model, or a repository's name, ORG/NAME"
        )
    try:
        config: dict[str, Any] = read_json(path, dict[str, Any], error=CheckpointError)
    except FileNotFoundError:
        said = no_huggingface_model(folder) or (
            f"has no {CONFIG}, so it is not a Hugging Face model: give the folder that "
            "`hf download NAME --local-dir FOLDER` made"
        )
        raise CheckpointError(f"{folder} {said}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from None
    return as_published(config, where=str(path))


def tensors_in(folder: Path) -> dict[str, LazyTensor]:
    """Every tensor of the folder's weight files, by their names; safetensors where there are both kinds."""
    for single, read in zip(WEIGHTS, (safetensors_in, _torch_bin)):
        if (folder / single).exists():
            return dict(read(folder / single))
        if homes := homes_of_tensors(folder, single):
            return _joined_parts(folder, homes, read)
    said = other_weights(folder)
    if said is None and (shards := sorted(folder.glob("*.safetensors"))):
        said = f"it holds {listed([path.name for path in shards])}, and the index that names them is missing"
    raise CheckpointError(
        f"{folder} holds no {' or '.join(WEIGHTS)}, whole or in parts with an index{f'; {said}' if said else ''}"
    )


def tensors_of(path: Path) -> dict[str, LazyTensor]:
    """The tensors of one weight file, in safetensors or a pickle of torch's, by name."""
    return dict(safetensors_in(path) if path.suffix == ".safetensors" else _torch_bin(path))


def homes_of_tensors(folder: Path, single: str) -> dict[str, str]:
    """The file of each tensor, as the index of the parts of the weight file ``single`` says; none without an index."""
    index = folder / f"{single}.index.json"
    if not index.exists():
        return {}
    try:
        found = read_json(index, dict[str, Any], error=CheckpointError, most_bytes=VOCABULARY_BYTES)
    except OSError as error:
        raise CheckpointError(f"{index} cannot be read ({error.strerror})") from None
    homes: dict[str, str] = as_kind(
        found.get("weight_map"), dict[str, str], where=f"{index}: weight_map", error=CheckpointError
    )
    if not homes:
        raise CheckpointError(f"{index} names no files at all: download it again")
    return homes


def _joined_parts(
    folder: Path, homes: Mapping[str, str], read: Callable[[Path], Iterator[tuple[str, LazyTensor]]]
) -> dict[str, LazyTensor]:
    """The tensors of the files that an index names; CheckpointError where it and the files disagree."""
    files = sorted(set(homes.values()))
    held = {path.name for path in folder.iterdir() if not path.is_dir()}
    if missing := [name for name in files if name not in held]:
        raise CheckpointError(
            f"the index in {folder} names files that are not in the folder: {', '.join(map(repr, missing[:6]))}; "
            "download them"
        )
    tensors: dict[str, LazyTensor] = {}
    found: dict[str, str] = {}
    for file in files:
        for name, tensor in read(folder / file):
            if name in found:
                raise CheckpointError(f"{folder} holds {name} twice, in {found[name]} and in {file}: keep one of them")
            tensors[name], found[name] = tensor, file
    for name, file in homes.items():
        if found.get(name) != file:
            actual = f"it is in {found[name]}" if name in found else "no file has it"
            raise CheckpointError(
                f"the index in {folder} says that {name} is in {file}, but {actual}: download it again"
            )
    return tensors


def safetensors_in(path: Path) -> Iterator[tuple[str, LazyTensor]]:
    """Every tensor of a safetensors file, by name; CheckpointError for one that is none."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise CheckpointError(
            f"{path} is read with safetensors, which is not installed: pip install safetensors"
        ) from None
    try:
        check_regular(path, where=str(path), error=CheckpointError)
        if path.is_dir():
            raise CheckpointError(f"{path} is a folder, and should be a safetensors file: download it again")
        _refuse_pointer(path)
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (it is no mapping)
                view = file.get_slice(name)
                if view.get_dtype() not in _DTYPES | QUANTIZED:
                    kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES.values())
                    raise CheckpointError(
                        f"{path}: {name} is of type {view.get_dtype()}; weights are {kinds} (GPTQ, AWQ and the like "
                        "quantize them: take the model in bf16)"
                    )
                yield (
                    name,
                    LazyTensor(
                        tuple(view.get_shape()), (_DTYPES | QUANTIZED)[view.get_dtype()], partial(_read, path, name)
                    ),
                )
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or incomplete ({error})") from None


def _refuse_pointer(path: Path) -> None:
    """Raise CheckpointError for the few lines that a clone without git-lfs has in place of a file."""
    with path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise CheckpointError(f"{path} is only git's pointer to the file: run git lfs pull in its folder")


def _read(path: Path, name: str) -> Tensor:
    """A tensor of a file that is opened anew, so that pages read before are given back."""
    from safetensors import safe_open

    check_regular(path, where=str(path), error=CheckpointError)
    with safe_open(path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
        return tensor


def _torch_bin(path: Path) -> Iterator[tuple[str, LazyTensor]]:
    content = load_torch_file(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no named tensors")
    for name, tensor in content.items():
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{path}: {name} is not a tensor")
        yield str(name), LazyTensor(tuple(tensor.shape), tensor.dtype, tensor.detach)
