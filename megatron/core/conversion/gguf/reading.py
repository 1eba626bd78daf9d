"""A GGUF file as a portable model: weights of few bits become the numbers that they stand for."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from megatron.core.conversion.chat_files import read_chat
from megatron.core.conversion.companions import companions_in, tokenizer_in
from megatron.core.conversion.gguf.architecture import Architecture, architecture_named
from megatron.core.conversion.gguf.files import GgufFile, open_gguf
from megatron.core.conversion.gguf.keys import check_keys
from megatron.core.conversion.gguf.rotary import FACTORS
from megatron.core.conversion.gguf.tensors import EMBEDDING, OUTPUT, divided, file_matches
from megatron.core.conversion.gguf.tokenizer_files import write_tokenizer
from megatron.core.conversion.huggingface.reading import CONFIG
from megatron.core.conversion.huggingface.writing import fitting_type, theirs_of
from megatron.core.conversion.portable import (
    LazyTensor,
    PortableModel,
    check_shapes,
    refuse_larger_weights,
    refuse_more_layers,
    refuse_out_of_bounds,
)
from megatron.core.conversion.tables import to_ours, to_theirs
from megatron.errors import CheckpointError


def is_gguf(place: Path) -> bool:
    """Whether a path is a GGUF file, or a folder with one in place of a Hugging Face model."""
    if place.is_dir():
        return not (place / CONFIG).exists() and any(place.glob("*.gguf"))
    return place.suffix == ".gguf"


def read_gguf(place: Path, *, scratch: Path) -> PortableModel:
    """The model in a GGUF file or a folder with one; its tokenizer's files are in ``scratch``, which is made once.

    Raises CheckpointError for a file that is damaged, an architecture that isn't known, and keys or tensors that don't
    fit it.
    """
    file, where = open_gguf(place), str(place)
    name = str(file.keys.get("general.architecture"))
    architecture, written = architecture_named(name, where=where)
    keys = {key.removeprefix(f"{name}."): value for key, value in file.keys.items()}
    check_keys(keys, where=where)
    keys.setdefault("vocab_size", len(keys.get("tokenizer.ggml.tokens", ())))
    tensors = _without_copy(file, architecture)
    factors = {each: tensors[each].make().tolist() for each in FACTORS if each in tensors}
    try:
        model, groups = written.read({**keys, **factors}, tensors, architecture)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise CheckpointError(f"{where}: its keys don't describe a {name} model: {error}") from None
    refuse_more_layers(model, groups, tensors, where=where)
    refuse_out_of_bounds((model, *groups), {}, where=where)
    refuse_larger_weights(model, groups, tensors, where=where)
    model_type = fitting_type(model, groups, wanted=architecture.types)
    published = theirs_of(model, groups, model_type)
    shapes = {
        their: tuple(part.shape)
        for match in published
        for their, part in zip(match.theirs, match.transform.split(torch.empty(match.shape, device="meta"), model))
    }
    in_halves = dataclasses.replace(model, rotary_interleaved=False)
    whole, parts = divided(shapes, groups, architecture)
    of_parts = {
        part: tuple(one.shape)
        for match in parts
        for part, one in zip(match.theirs, match.transform.split(torch.empty(match.shape, device="meta"), in_halves))
    }
    found = file_matches({**{name: shapes[name] for name in whole}, **of_parts}, in_halves, groups, architecture)
    held = {each: tensor for each, tensor in tensors.items() if each not in FACTORS}
    check_shapes(
        {each: tensor.shape for each, tensor in held.items()}, {match.ours: match.shape for match in found}, where=where
    )
    theirs = to_theirs(found, held, in_halves)
    of_file = {part: theirs.pop(part) for part in of_parts}
    theirs |= to_ours(parts, of_file, in_halves, where=where)
    _write_once(keys, scratch)
    tokenizer = tokenizer_in(scratch, rows=model.vocab_size or 0)
    files = companions_in(scratch)
    chat, notes = read_chat(files, tokenizer, rows=model.vocab_size or 0)
    return PortableModel(
        model=model,
        groups=groups,
        tensors=to_ours(published, theirs, model, where=where),
        tokenizer=tokenizer,
        seq_length=min(model.max_position_embeddings, 4096),
        companions=files,
        notes=(f"note: {where} holds numbers of the types {', '.join(file.kinds)}", *notes),
        chat=chat,
    )


def _write_once(keys: Mapping[str, Any], folder: Path) -> None:
    """Write the tokenizer's files, unless another process has done so; nobody sees a part of them."""
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as aside:
        whole = Path(aside, folder.name)
        write_tokenizer(keys, whole)
        with suppress(OSError):  # it is there by now
            whole.rename(folder)


def _without_copy(file: GgufFile, architecture: Architecture) -> dict[str, LazyTensor]:
    """The tensors, without an output layer that is the word embedding again, as architectures need that don't tie."""
    tensors = dict(file.tensors)
    if architecture.has_output and tensors.keys() >= {OUTPUT, EMBEDDING}:
        output, embedding = tensors[OUTPUT], tensors[EMBEDDING]
        if output.shape == embedding.shape and torch.equal(output.make(), embedding.make()):
            del tensors[OUTPUT]
    return tensors
