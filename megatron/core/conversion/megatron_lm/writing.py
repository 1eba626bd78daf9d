"""Portable models as checkpoints that Megatron-LM loads: torch_dist, or its torch format with core names, one rank."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron.core.checkpointing.folders import TRACKER
from megatron.core.checkpointing.storage import CheckpointWriter
from megatron.core.checkpointing.streamed import StreamedBox, table_of, write_boxes, write_objects
from megatron.core.conversion.companions import FOLDER, copied_tokenizer, copy_files
from megatron.core.conversion.megatron_lm.arguments import arguments_of
from megatron.core.conversion.megatron_lm.files import BACKEND, COMMON, RELEASE
from megatron.core.conversion.megatron_lm.format import MegatronLMFormat, format_for
from megatron.core.conversion.megatron_lm.names import LAYER, Names, depths_of
from megatron.core.conversion.portable import LazyTensor, PortableModel
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
    theirs = format_for(portable.groups)
    model, title, is_older = portable.model, family_of(portable.groups).title, not theirs.has_latest_attention
    unsupported = {
        f"no norms of queries and keys in a {title}": is_older and model.has_qk_norms,
        f"no YaRN in a {title}": is_older and model.position_embedding_type == "yarn",
        **theirs.unsupported(portable),
    }
    args = arguments_of(portable, dist=dist, own=theirs.arguments(portable), unsupported=unsupported)
    if portable.companions:
        moved = copied_tokenizer(portable.tokenizer, final / FOLDER)
        args.tokenizer_model, args.vocab_file, args.merge_file = (
            moved.tokenizer_model,
            moved.vocab_file,
            moved.merge_file,
        )
    name = f"iter_{portable.iteration:07d}" if portable.iteration else RELEASE
    common = {"args": args, "checkpoint_version": _VERSION, "iteration": portable.iteration}
    tensors = {name: _padded(name, tensor, portable) for name, tensor in theirs.tensors_to_write(portable).items()}
    folder = root / name
    folder.mkdir()
    if dist:
        _write_dist(tensors, theirs, common, folder)
    else:
        _write_torch(tensors, theirs.names, common, folder)
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


def _write_dist(
    tensors: dict[str, LazyTensor], theirs: MegatronLMFormat, common: dict[str, object], folder: Path
) -> None:
    """Layers are stacked along a new first dim; a box is one layer."""
    depths, boxes = depths_of(tensors), []
    for name, tensor in tensors.items():
        layer = LAYER.match(name)
        for key in theirs.names.stacked_names(name):
            if layer is None:
                boxes.append(StreamedBox.whole(key, tensor.shape, tensor.dtype, tensor.make))
                continue
            offsets = (int(layer[2]), *(0 for _ in tensor.shape))
            shape, sizes = (depths[layer[1]], *tensor.shape), (1, *tensor.shape)
            boxes.append(StreamedBox(key, shape, tensor.dtype, offsets, sizes, partial(_layer_of, tensor)))
    torch.save(common, folder / COMMON)
    writer = CheckpointWriter(folder)
    writer.set_up_storage_writer(True)
    metadata = table_of(boxes)
    metadata.mcore_data = {name: {} for name in metadata.state_dict_metadata}  # type: ignore[attr-defined]
    written = [write_boxes(writer, folder, boxes)]
    extra = _extra_states(
        {box.name.rpartition(".")[0] for box in boxes}, depths, of_output=theirs.output_has_extra_state
    )
    writer.finish(metadata, [*written, write_objects(writer, folder, extra, metadata)])
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    backend |= {"common_backend": "torch", "common_backend_version": 1}
    (folder / BACKEND).write_text(json.dumps(backend), encoding="utf-8")


def _extra_states(modules: set[str], depths: Mapping[str, int], *, of_output: bool) -> dict[str, bytes]:
    """The empty states that Megatron-LM's loader asks of every split matrix, whatever kernels it will run: in each
    layer, and for some families of the output.

    ``modules``: all that have tensors, those of layers once for a stack. ``depths``: layers by stack.
    """
    empty = io.BytesIO()
    torch.save([None], empty)
    attentions = {module.removesuffix("linear_proj") for module in modules if module.endswith("attention.linear_proj")}
    counts = {
        **{module: depths[module.split(".")[0]] for module in modules if ".linear_" in module},
        **{f"{attention}core_attention": depths[attention.split(".")[0]] for attention in attentions},
        **{module: 1 for module in modules if module.endswith("output_layer") and of_output},
    }
    return {
        f"{module}._extra_state/shard_{number}_{count}": empty.getvalue()
        for module, count in counts.items()
        for number in range(count)
    }


def _layer_of(tensor: LazyTensor) -> Tensor:
    return tensor.make().unsqueeze(0)


def _write_torch(tensors: dict[str, LazyTensor], names: Names, common: dict[str, object], folder: Path) -> None:
    """``torch.save`` wants all tensors at once, so they are put into mapped files and not into memory."""
    waiting = folder / "waiting"
    waiting.mkdir()
    model: dict[str, Tensor] = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        made = tensor.make()
        mapped = torch.from_file(str(waiting / str(number)), shared=True, size=made.numel(), dtype=made.dtype)
        mapped.copy_(made.reshape(-1))
        model |= dict.fromkeys(names.core_names(name), mapped.view(made.shape))
    target = folder / "mp_rank_00"
    target.mkdir()
    torch.save({**common, "model": model}, target / "model_optim_rng.pt")
    model.clear()
    shutil.rmtree(waiting)
