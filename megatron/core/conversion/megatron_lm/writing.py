"""Portable models as checkpoints that Megatron-LM loads: torch_dist, or its torch format with core names, one rank."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.core.checkpointing.folders import TRACKER
from megatron.core.checkpointing.storage import CheckpointWriter, ChecksummedFiles
from megatron.core.checkpointing.streamed import StreamedBox, table_of, write_boxes, write_objects
from megatron.core.conversion.chat_files import write_chat
from megatron.core.conversion.companions import FOLDER, copied_tokenizer, copy_files, text_tokenizer_of
from megatron.core.conversion.megatron_lm.arguments import arguments_of
from megatron.core.conversion.megatron_lm.files import BACKEND, COMMON, RELEASE
from megatron.core.conversion.megatron_lm.format import format_for
from megatron.core.conversion.megatron_lm.names import LAYER, components_of, depths_of, is_of_experts
from megatron.core.conversion.megatron_lm.output_gates import GATED, gates_behind_queries
from megatron.core.conversion.portable import LazyTensor, PortableModel, parameters_of
from megatron.core.files.remote_path import AnyPath
from megatron.core.models.registry import family_of

_VERSION = 3.0
_BY_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")


def write_megatron_lm(portable: PortableModel, root: Path, *, dist: bool, final: AnyPath) -> None:
    """Write a folder of one checkpoint into the new folder ``root``, which will be moved to ``final``.

    ``dist``: in torch_dist format, which Megatron-LM loads at any layout; else in torch format for one rank. Raises
    CheckpointError for an architecture that Megatron-LM doesn't have.
    """
    root.mkdir(parents=True)
    copy_files(portable.companions, root / FOLDER)
    if portable.chat is not None:
        write_chat(portable.chat, root / FOLDER, text_tokenizer_of(portable.tokenizer), continues_texts=True)
    theirs = format_for(portable.groups)
    model, title, is_older = portable.model, family_of(portable.groups).title, not theirs.has_latest_layers
    unsupported = {
        f"no norms of queries and keys in a {title}": is_older and model.has_qk_norms,
        f"no gates on the output of attention in a {title}": is_older and model.attention_output_gate,
        f"no YaRN in a {title}": is_older and model.position_embedding_type == "yarn",
        **theirs.unsupported(portable),
    }
    args = arguments_of(portable, dist=dist, own=theirs.arguments(portable), unsupported=unsupported)
    is_engines = theirs.is_engines(portable.groups)
    args.moe_grouped_gemm = None if dist else is_engines  # how torch names experts; torch_dist has one name
    if portable.companions:
        moved = copied_tokenizer(portable.tokenizer, final / FOLDER)
        args.tokenizer_model, args.vocab_file, args.merge_file = (
            moved.tokenizer_model,
            moved.vocab_file,
            moved.merge_file,
        )
    name = f"iter_{portable.iteration:07d}" if portable.iteration else RELEASE
    common = {"args": args, "checkpoint_version": _VERSION, "iteration": portable.iteration}
    tensors = {
        name: _in_one_matrix(name, _with_gates(name, _padded(name, tensor, portable), portable.model))
        for name, tensor in theirs.tensors_to_write(portable).items()
    }
    folder = root / name
    folder.mkdir()
    if dist:
        _write_dist(tensors, portable, common, folder)
    else:
        names = theirs.names_of(portable.groups)
        spelled = partial(names.engine_names, tensors=tensors) if is_engines else names.core_names
        _write_torch(tensors, spelled, common, folder)
    (root / TRACKER).write_text(str(portable.iteration) if portable.iteration else RELEASE, encoding="utf-8")


def _padded(name: str, tensor: LazyTensor, portable: PortableModel) -> LazyTensor:
    """A vocabulary's tensor with rows of zeros up to the padded size; others as they are."""
    rows = portable.model.padded_vocab_size(1)
    if name not in _BY_VOCABULARY or tensor.shape[0] == rows:
        return tensor

    def make() -> Tensor:
        made = tensor.make()
        return torch.cat([made, made.new_zeros(rows - made.shape[0], *made.shape[1:])])

    return LazyTensor((rows, *tensor.shape[1:]), tensor.dtype, make)


def _with_gates(name: str, tensor: LazyTensor, model: ModelConfig) -> LazyTensor:
    """Queries and gates in Megatron-LM's order; others as they are."""
    if not model.attention_output_gate or GATED not in name:
        return tensor
    return LazyTensor(tensor.shape, tensor.dtype, lambda: tensor.make()[gates_behind_queries(model)])


def _in_one_matrix(name: str, tensor: LazyTensor) -> LazyTensor:
    """Gates and values of experts one below the other; others as they are."""
    if not is_of_experts(name) or ".linear_fc1." not in name:
        return tensor
    experts, matrices, width, *rest = tensor.shape
    return LazyTensor((experts, matrices * width, *rest), tensor.dtype, lambda: tensor.make().flatten(1, 2))


def _write_dist(
    tensors: dict[str, LazyTensor], portable: PortableModel, common: dict[str, object], folder: Path
) -> None:
    """Layers that are all alike are stacked along a new first dim, a box being one layer. Others keep their numbers,
    and mixers with a state have a key for each component of some tensors.
    """
    depths, boxes, extra = depths_of(tensors), list[StreamedBox](), dict[str, bytes]()
    kinds, theirs = _kinds_of_layers(tensors), format_for(portable.groups)
    names, shardings = theirs.names_of(portable.groups), parameters_of(portable.model, portable.groups)
    rows_of_components = {
        name: [part.rows for part in shardings[name].parts] for name in tensors if components_of(name)
    }
    is_plain = not any(".linear_kv_down_proj." in name or is_of_experts(name) for name in tensors)
    has_numbers = theirs.is_engines(portable.groups)
    for name, tensor in tensors.items():
        layer = LAYER.match(name)
        is_stacked = layer is not None and layer[1] != "mtp" and len(kinds[layer[1]]) == 1 and not has_numbers
        keys = names.dist_names(name, tensors, has_numbers=not is_stacked, is_plain=is_plain)
        for key in keys:
            place = None
            if layer is not None and is_stacked:
                place = (int(layer[2]), depths[layer[1]])
            if widths := rows_of_components.get(name):
                boxes += _component_boxes(key, components_of(name), widths, tensor)
                extra |= _extra_states(key, None, None) if ".in_proj." in key else {}
                continue
            boxes.append(_box(key, tensor, place))
            if is_of_experts(name):
                extra |= _extra_states(key, tensor.shape[0], place)
            elif _has_extra_state(key, of_output=theirs.output_has_extra_state):
                extra |= _extra_states(key, None, place)
    with ChecksummedFiles().create_stream(folder / COMMON, "wb") as stream:
        torch.save(common, stream)  # type: ignore[arg-type]
    writer = CheckpointWriter(folder)
    writer.set_up_storage_writer(True)
    metadata = table_of(boxes)
    metadata.mcore_data = {name: {} for name in metadata.state_dict_metadata}  # type: ignore[attr-defined]
    written = [write_boxes(writer, folder, boxes)]
    writer.finish(metadata, [*written, write_objects(writer, folder, extra, metadata)])
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    backend |= {"common_backend": "torch", "common_backend_version": 1}
    (folder / BACKEND).write_text(json.dumps(backend), encoding="utf-8")


def _kinds_of_layers(tensors: Iterable[str]) -> dict[str, set[frozenset[str]]]:
    """The sets of names that the layers of each stack have: one set where layers are all alike."""
    found: dict[str, dict[str, set[str]]] = {}
    for name in tensors:
        if layer := LAYER.match(name):
            found.setdefault(layer[1], {}).setdefault(layer[2], set()).add(name[layer.end() :])
    return {stack: set(map(frozenset, layers.values())) for stack, layers in found.items()}


def _box(key: str, tensor: LazyTensor, place: tuple[int, int] | None) -> StreamedBox:
    """The tensor, or one of the layers of a stacked one. ``place``: the layer's number, and how many there are."""
    if place is None:
        return StreamedBox.whole(key, tensor.shape, tensor.dtype, tensor.make)
    number, depth = place
    offsets = (number, *(0 for _ in tensor.shape))
    shape, sizes = (depth, *tensor.shape), (1, *tensor.shape)
    return StreamedBox(key, shape, tensor.dtype, offsets, sizes, partial(_layer_of, tensor))


def _component_boxes(
    key: str, components: Sequence[str], rows: Sequence[int], tensor: LazyTensor
) -> Iterator[StreamedBox]:
    """A box for each of the ``components`` that lie one below the other in ``tensor``, with so many ``rows``."""
    starts = [sum(rows[:number]) for number in range(len(rows))]
    for component, start, count in zip(components, starts, rows):
        make = partial(_rows_of, tensor, start, count)
        yield StreamedBox.whole(f"{key}.{component}", (count, *tensor.shape[1:]), tensor.dtype, make)


def _rows_of(tensor: LazyTensor, start: int, count: int) -> Tensor:
    return tensor.make()[start : start + count]


def _has_extra_state(key: str, *, of_output: bool) -> bool:
    module, _, kind = key.rpartition(".")
    is_split = ".linear_" in module or module.endswith((".eh_proj", ".in_proj", ".out_proj"))
    return (is_split and not kind.startswith("layer_norm_")) or (module.endswith("output_layer") and of_output)


def _extra_states(key: str, experts: int | None, place: tuple[int, int] | None) -> dict[str, bytes]:
    """The empty states that Megatron-LM's loader asks of every split matrix, whatever kernels it will run, and of the
    attention in front of an output matrix: of each layer and each of its ``experts``, or of the one there is.
    """
    empty = io.BytesIO()
    torch.save([None], empty)
    module = key.rpartition(".")[0]
    modules = [module]
    if module.endswith("attention.linear_proj"):
        modules.append(f"{module.removesuffix('linear_proj')}core_attention")
    before = [place] if place is not None else []
    places = [[*before, (expert, experts)] for expert in range(experts)] if experts else [before or [(0, 1)]]
    ends = ["_".join(".".join(str(each[side]) for each in at) for side in (0, 1)) for at in places]
    return {f"{each}._extra_state/shard_{end}": empty.getvalue() for each in modules for end in ends}


def _layer_of(tensor: LazyTensor) -> Tensor:
    return tensor.make().unsqueeze(0)


def _write_torch(
    tensors: dict[str, LazyTensor], spelled: Callable[[str], list[str]], common: dict[str, object], folder: Path
) -> None:
    """``torch.save`` wants all tensors at once, so they are put into mapped files and not into memory.

    ``spelled``: gives the names there of one of ours.
    """
    waiting = folder / "waiting"
    waiting.mkdir()
    model: dict[str, Tensor] = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        made = tensor.make()
        mapped = torch.from_file(str(waiting / str(number)), shared=True, size=made.numel(), dtype=made.dtype)
        mapped.copy_(made.reshape(-1))
        whole = mapped.view(made.shape)
        for core in spelled(name):
            of_experts = enumerate(whole) if is_of_experts(name) else [(0, whole)]
            model |= {core.replace("{e}", str(number)): each for number, each in of_experts}
    target = folder / "mp_rank_00"
    target.mkdir()
    with ChecksummedFiles().create_stream(target / "model_optim_rng.pt", "wb") as stream:
        torch.save({**common, "model": model}, stream)  # type: ignore[arg-type]
    model.clear()
    shutil.rmtree(waiting)
