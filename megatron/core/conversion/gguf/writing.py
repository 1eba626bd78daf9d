"""A portable model as a GGUF file: one that llama.cpp and the programs built on it run."""

from __future__ import annotations

import dataclasses
import errno
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.config.flags import flags_of
from megatron.config.model import ModelConfig
from megatron.core.conversion.companions import text_tokenizer_of
from megatron.core.conversion.gguf.architecture import Architecture, GgufFormat, known_architectures
from megatron.core.conversion.gguf.k_types import packed
from megatron.core.conversion.gguf.number_types import FEW_BITS, FILE_TYPES, library, tensor_types
from megatron.core.conversion.gguf.rotary import factor_tensors, spelled_out
from megatron.core.conversion.gguf.tensors import EMBEDDING, OUTPUT, divided, file_matches
from megatron.core.conversion.gguf.vocabulary import vocabulary_keys
from megatron.core.conversion.huggingface.reading import CONFIG, read_config
from megatron.core.conversion.huggingface.writing import published_form
from megatron.core.conversion.portable import LazyTensor, PortableModel
from megatron.core.conversion.programs import GgufType
from megatron.core.conversion.tables import to_ours, to_theirs
from megatron.core.models.registry import family_of
from megatron.errors import CheckpointError

LATER_TOKENS = "mtp."
"""Beginning of our names of layers that predict later tokens, of which files have none."""
WITHOUT_PREFIX = ("general.", "tokenizer.")
"""Beginnings of keys that are the same in files of all architectures."""


@dataclass(frozen=True)
class GgufForm:
    """A model as a file holds it: its architecture, keys without that name in front, and tensors. ``notes``: what the
    file says otherwise than the model.
    """

    architecture: Architecture
    keys: Mapping[str, Any]
    tensors: Mapping[str, LazyTensor]
    notes: tuple[str, ...]


def gguf_form(portable: PortableModel) -> GgufForm:
    """The model as a file holds it; CheckpointError for one that llama.cpp doesn't know, or a setting that files can't
    say.
    """
    given, portable = portable, _without_later_tokens(portable)
    architecture, written, published = _architecture_of(portable)
    model = portable.model
    if architecture.period is None and model.window_size is not None:
        model = _without_windows(model)
    if wrong := architecture.refuse(model, portable.groups):
        raise _computed_otherwise(architecture, wrong)
    exact = model, tuple(portable.groups)
    model, groups = architecture.computed(*exact)
    shapes = {name: tensor.shape for name, tensor in published.items()}
    in_halves = dataclasses.replace(model, rotary_interleaved=False)
    whole, parts = divided(shapes, groups, architecture)
    theirs = {**{name: published[name] for name in whole}, **to_theirs(parts, published, in_halves)}
    found = file_matches({name: tensor.shape for name, tensor in theirs.items()}, in_halves, groups, architecture)
    tensors = {**to_ours(found, theirs, in_halves, where=f"a {architecture.name} file"), **factor_tensors(model)}
    if architecture.has_output and OUTPUT not in tensors:
        tensors[OUTPUT] = _scaled(tensors[EMBEDDING], architecture.output_scale(*exact))
    keys = written.written(model, groups, architecture)
    if architecture.has_encoder and (start := _decoder_start(portable)) is not None:
        keys["decoder_start_token_id"] = start
    again = partial(written.read, architecture=architecture)
    _check_said(model, groups, keys, tensors, architecture, again)
    words = vocabulary_keys(portable.tokenizer, portable.chat, rows=model.vocab_size or 0)
    differs = (model, groups) != exact or architecture.as_run(model, groups) != (model, groups)
    notes = [f"note: {architecture.difference}"] * differs
    return GgufForm(architecture, {**keys, **words}, tensors, (*_notes(given.model, model), *notes))


def _decoder_start(portable: PortableModel) -> int | None:
    """The id that a decoder's text begins with, as the source's settings or its tokenizer say."""
    settings = read_config(path.parent) if (path := portable.companions.get(CONFIG)) else {}
    tokenizer = text_tokenizer_of(portable.tokenizer)
    found = settings.get("decoder_start_token_id", getattr(tokenizer, "decoder_start", None))
    return found if type(found) is int and found >= 0 else None


def _scaled(tensor: LazyTensor, factor: float) -> LazyTensor:
    if factor == 1.0:
        return tensor
    return LazyTensor(tensor.shape, torch.float32, lambda: tensor.make().float() * factor)


def _architecture_of(portable: PortableModel) -> tuple[Architecture, GgufFormat, Mapping[str, LazyTensor]]:
    """The architecture that the model is written as, its family's format, and the published type's tensors."""
    groups = portable.groups
    by_type = {each: found for found in known_architectures() if found[0].fits(groups) for each in found[0].types}
    model_type, published = published_form(portable, wanted=list(by_type))
    if model_type not in by_type:
        raise CheckpointError(
            f"GGUF files are not written of a {family_of(portable.groups).title} of the published type {model_type}, "
            f"but of {', '.join(sorted(by_type))}; the nearest way is a folder that vLLM and transformers read: --to hf"
        )
    return (*by_type[model_type], published)


def _without_later_tokens(portable: PortableModel) -> PortableModel:
    """The model without layers of multi-token prediction, which llama.cpp doesn't compute: it predicts one token."""
    if not portable.model.mtp_num_layers:
        return portable
    tensors = {name: tensor for name, tensor in portable.tensors.items() if not name.startswith(LATER_TOKENS)}
    return dataclasses.replace(portable, model=dataclasses.replace(portable.model, mtp_num_layers=0), tensors=tensors)


def _without_windows(model: ModelConfig) -> ModelConfig:
    """The model with full attention, and no longer texts than its window: both compute the same."""
    assert model.window_size is not None
    longest = min(model.max_position_embeddings, model.window_size[0] + 1)
    full: Any = dict.fromkeys(("window_size", "window_attn_skip_freq", "rotary_base_local"))
    return dataclasses.replace(model, **full, max_position_embeddings=longest)


def _notes(model: ModelConfig, written: ModelConfig) -> Iterator[str]:
    """What users should know of a model that was ``written`` otherwise, or that llama.cpp computes otherwise."""
    if model.mtp_num_layers != written.mtp_num_layers:
        yield "note: llama.cpp predicts the next token alone: layers of multi-token prediction are left out of the file"
    longest, window = written.max_position_embeddings, model.window_size
    if longest != model.max_position_embeddings and window is not None:
        yield (
            f"note: llama.cpp has no windows in this architecture: the file's context is the window, {longest} of "
            f"{model.max_position_embeddings} positions, within which full attention is the same"
        )
    if "gelu" in model.activation and not model.activation.endswith("_tanh"):
        yield "note: llama.cpp computes GELU by its tanh form, about 0.0005 from the exact one that this model has"
    if model.position_embedding_type == "longrope":
        yield (
            "note: llama.cpp takes LongRoPE's long factors for every text once its context is longer than "
            f"{model.original_max_position_embeddings} tokens: give it a context (-c) of at most as many for short "
            "texts"
        )


def _check_said(
    model: ModelConfig,
    groups: Sequence[object],
    keys: Mapping[str, Any],
    tensors: Mapping[str, LazyTensor],
    architecture: Architecture,
    read: Callable[[Mapping[str, Any], Collection[str]], tuple[ModelConfig, tuple[object, ...]]],
) -> None:
    """Raise CheckpointError for a setting that reading the file wouldn't find again."""
    factors = {name: tensor.make().tolist() for name, tensor in factor_tensors(model).items()}
    names = tensors if model.untie_embeddings_and_output_weights else tensors.keys() - {OUTPUT}
    again, groups_again = read({**keys, **factors}, names)
    wrong = [
        f"{flag.positive} is {mine} and not {getattr(theirs, flag.field)}"
        for own, theirs in ((spelled_out(model), spelled_out(again)), *zip(groups, groups_again))
        for flag in flags_of(type(own))
        if flag.options.architecture
        and flag.field not in ("rotary_interleaved", *architecture.unread)
        and not _same(mine := getattr(own, flag.field), getattr(theirs, flag.field))
    ]
    if wrong:
        raise _computed_otherwise(architecture, wrong)


def _computed_otherwise(architecture: Architecture, reasons: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        f"this model can't be written as GGUF, as it differs from llama.cpp's {architecture.name}: "
        f"{'; '.join(reasons)}; a folder that vLLM and transformers read is written by --to hf"
    )


def _same(one: Any, other: Any) -> bool:
    """Whether settings are the same but for the rounding to 32 bits."""
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return all(map(_same, one, other))
    if isinstance(one, float) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=1e-5)
    return bool(one == other)


def write_gguf(
    portable: PortableModel, folder: Path, *, kind: GgufType, say: Callable[[str], None], max_shard_size: int
) -> None:
    """Write the model into the new ``folder`` with its weights as ``kind``: one file, or parts of ``max_shard_size``
    bytes. A tensor is in memory at a time.
    """
    if portable.quantization is not None and kind in FEW_BITS:
        raise CheckpointError(
            f"--gguf-type {kind} would round again what {portable.quantization.scheme.name} has rounded already: "
            "give --gguf-type f32, f16 or bf16, or convert the model that was quantized"
        )
    form, gguf = gguf_form(portable), library()
    types = tensor_types(form.tensors, kind, say=say)
    for note in form.notes:
        say(note)
    folder.mkdir(parents=True)
    file = folder / f"{folder.name}-{kind.upper()}.gguf"
    size = sum(_nbytes(tensor.shape, types[name]) for name, tensor in form.tensors.items())
    limit = max_shard_size if size > max_shard_size else 0
    writer = gguf.GGUFWriter(file, form.architecture.name, split_max_size=limit)
    for name, tensor in form.tensors.items():
        number, shape = _layout(tensor.shape, types[name])
        writer.add_tensor_info(name, shape, number, _nbytes(tensor.shape, types[name]), types[name])
    general = {
        "general.type": "model",
        "general.name": folder.name,
        "general.file_type": FILE_TYPES[kind],
        "general.quantization_version": gguf.GGML_QUANT_VERSION,
    }
    for key, value in {**general, **form.keys}.items():
        whole = key if key.startswith(WITHOUT_PREFIX) else f"{form.architecture.name}.{key}"
        _add(writer, whole, value)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, tensor in form.tensors.items():
            numbers = tensor.make().float().contiguous().numpy()
            writer.write_tensor_data(packed(numbers, types[name]))
    except OSError as error:
        if error.errno is not None:
            raise
        # numpy says how many numbers it wrote, and not why it stopped.
        raise OSError(errno.ENOSPC, f"only a part was written ({error}), as on a full disk", str(file)) from error
    finally:
        writer.close()


def _layout(shape: Sequence[int], kind: Any) -> tuple[np.dtype[Any], Sequence[int]]:
    """The type and shape of the array that holds a tensor of a ``kind``, as its writer wants them."""
    plain: Any = {"F32": np.float32, "F16": np.float16}.get(kind.name)
    if plain is not None:
        return np.dtype(plain), shape
    return np.dtype(np.uint8), library().quant_shape_to_byte_shape(shape, kind)


def _nbytes(shape: Sequence[int], kind: Any) -> int:
    number, held = _layout(shape, kind)
    return math.prod(held) * number.itemsize


def _add(writer: Any, key: str, value: Any) -> None:
    """Add a key of the type that its value has; whole numbers are unsigned with 32 bits."""
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case bytes():
            writer.add_array(key, value)
        case _:
            writer.add_array(key, list(value))
