"""Checkpoints of Megatron-LM as portable models: shards of its torch format, and its torch_dist format."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron.core.conversion.companions import tokenizer_files, tokenizer_of
from megatron.core.conversion.megatron_lm.arguments import (
    check_is_known,
    model_from_arguments,
    tokenizer_from_arguments,
)
from megatron.core.conversion.megatron_lm.files import DistFiles, ShardFiles, open_checkpoint
from megatron.core.conversion.megatron_lm.format import MegatronLMFormat, family_among, format_of
from megatron.core.conversion.megatron_lm.names import LAYER, WORDS, depths_of, is_legacy, is_weight
from megatron.core.conversion.portable import LazyTensor, PortableModel, check_shapes, parameters_of
from megatron.core.models.registry import Family
from megatron.core.parallel.sharding import Sharding
from megatron.errors import CheckpointError

EMBEDDING = WORDS.ours
_BY_VOCABULARY = (EMBEDDING, "output_layer.weight", "output_layer.bias")
_FUSED = {".linear_qkv.": 3, ".linear_kv.": 2}  # matrices of several kinds of heads, and how many


Parts = Sequence[LazyTensor]
"""One of our tensors as the tensor-parallel parts that are stored, each read when it is wanted."""


def read_megatron_lm(
    root: Path, *, step: int | None = None, true_vocab_size: int | None = None, ignored: Collection[str] = ()
) -> PortableModel:
    """The model of a checkpoint of Megatron-LM's training.

    ``ignored``: saved arguments that are read as if they weren't there. ``true_vocab_size``: words before padding;
    taken from the tokenizer where its files are at hand, and else all rows are kept. Raises CheckpointError for a model
    that isn't available, and for files that are missing or don't fit together.
    """
    files = open_checkpoint(root, step=step, ignored=ignored)
    family = family_among(files.names())
    theirs = format_of(family)
    files.args.check_kinds(theirs.kinds)
    check_is_known(files.args, family.settings, has_latest_attention=theirs.has_latest_attention)
    theirs.check(files.args)
    stored = _parts_of_shards(files, family) if isinstance(files, ShardFiles) else _parts_of_dist(files, family)
    if EMBEDDING not in stored:
        raise CheckpointError(f"{files.folder} holds no word embeddings, so it is not a language model's")
    rows = sum(part.shape[0] for part in stored[EMBEDDING])
    tokenizer = tokenizer_from_arguments(files.args, rows=rows)
    known = tokenizer_of(tokenizer)
    vocab_size = true_vocab_size or (known.vocab_size if known is not None and known.vocab_size <= rows else rows)
    if vocab_size > rows:
        raise CheckpointError(f"{files.folder} embeds {rows} words: --true-vocab-size {vocab_size} is more than that")
    if tokenizer.tokenizer_type == "NullTokenizer":
        tokenizer = dataclasses.replace(tokenizer, vocab_size=vocab_size - 1)
    _check_depths(depths_of(stored), files, theirs)
    legacy, num_layers = is_legacy(files.names()), files.args("num_layers")
    model = model_from_arguments(files.args, vocab_size=vocab_size, num_layers=num_layers, legacy=legacy)
    groups = theirs.groups_from_arguments(files.args, model, stored, legacy=legacy)
    default_tensors = theirs.default_tensors({name: held[0] for name, held in stored.items()})
    stored = {name: (tensor,) for name, tensor in default_tensors.items()} | stored
    wanted = parameters_of(model, groups)
    shapes = {name: _shape(name, held, wanted[name]) if name in wanted else [] for name, held in stored.items()}
    check_shapes(shapes, {name: sharding.shape for name, sharding in wanted.items()}, where=str(files.folder))
    merge = _Merge(model.num_attention_heads, model.kv_channels, files.version, vocab_size)
    return PortableModel(
        model=model,
        groups=groups,
        tensors={
            name: LazyTensor(sharding.shape, stored[name][0].dtype, partial(merge.join, name, stored[name], sharding))
            for name, sharding in wanted.items()
        },
        tokenizer=tokenizer,
        seq_length=min(files.args("seq_length", model.max_position_embeddings), model.max_position_embeddings),
        companions=tokenizer_files(tokenizer),
        iteration=files.iteration,
        consumed_samples=files.args("consumed_train_samples", 0),
    )


def _check_depths(depths: Mapping[str, int], files: ShardFiles | DistFiles, theirs: MegatronLMFormat) -> None:
    """Raise CheckpointError when a stack hasn't as many layers as the settings say."""
    num_layers = files.args("num_layers")
    for stack, depth in depths.items():
        argument = theirs.layer_count_arguments.get(stack, "num_layers")
        own = files.args(argument, num_layers)
        if depth not in (num_layers, own):
            said = f"num_layers {num_layers}" + (f", {argument} {own}" if own != num_layers else "")
            raise CheckpointError(f"{files.folder} holds {depth} layers; its saved settings say {said}")


def _parts_of_shards(files: ShardFiles, family: Family) -> dict[str, Parts]:
    """Our names with a part for each tensor-parallel rank; layers are numbered within their stage. Of tensors that
    several stages have, the last stage's count.
    """
    names, replicated = format_of(family).names, format_of(family).replicated
    found: dict[str, Parts] = {}
    first_layers: dict[str, int] = {}
    for stage in files.stages:
        next_layers = dict(first_layers)
        for theirs in filter(is_weight, stage[0]):
            ours = names.our_name(theirs, first_layers=first_layers)
            if ours is None:
                raise _unknown(theirs, files.folder, family)
            if ours == "output_layer.weight" and not files.args("untie_embeddings_and_output_weights", False):
                continue  # the last stage's copy of tied embeddings
            if layer := LAYER.match(ours):
                next_layers[layer[1]] = max(next_layers.get(layer[1], 0), int(layer[2]) + 1)
            lacking = [rank for rank, shard in enumerate(stage) if theirs not in shard]
            if lacking:
                raise CheckpointError(f"{files.folder}: tensor-parallel rank {lacking[0]} lacks {theirs}")
            if ours in replicated and len(files.stages) > 1:
                raise CheckpointError(
                    f"{files.folder} has relative positions in pipeline stages, and each stage trained its own "
                    "tables: convert a torch_dist checkpoint"
                )
            shards = stage[:1] if ours in replicated else stage
            found[ours] = [
                LazyTensor(tuple(shard[theirs].shape), shard[theirs].dtype, shard[theirs].detach) for shard in shards
            ]
        first_layers = next_layers
    return found


def _unknown(name: str, folder: Path, family: Family) -> CheckpointError:
    return CheckpointError(f"{folder} holds {name}, which is not a known tensor of a {family.title}")


def _parts_of_dist(files: DistFiles, family: Family) -> dict[str, Parts]:
    """Our names, each one part: torch_dist holds logical tensors, with layers stacked unless they differ."""
    names = format_of(family).names
    found: dict[str, Parts] = {}
    for key, entry in files.stored.entries.items():
        if not is_weight(key) or key.split(".")[0] not in names.roots:
            continue  # optimizer and random states
        layers = names.our_names_of_stack(key, entry.shape[0] if entry.shape else 0)
        ours = names.our_name(key)
        if layers is not None:
            for number, name in enumerate(layers):
                found[name] = [LazyTensor(entry.shape[1:], entry.dtype, partial(files.stored.read, key, at=number))]
        elif ours is not None:
            found[ours] = [LazyTensor(entry.shape, entry.dtype, partial(files.stored.read, key))]
        else:
            raise _unknown(key, files.folder, family)
    return found


@dataclass(frozen=True)
class _Merge:
    """How parts become a tensor: what their order of query, key and value is, and where padding begins."""

    heads: int
    width: int
    version: float
    vocab_size: int

    def join(self, name: str, stored: Parts, sharding: Sharding) -> Tensor:
        """The logical tensor."""
        parts = [part.make() for part in stored]
        for matrix, kinds in _FUSED.items():
            if matrix in name:
                parts = [self._by_head(part, kinds, len(parts)) for part in parts]
        if not sharding.split:
            return parts[0]
        (dim,) = sharding.split
        blocks = [part.chunk(sharding.blocks, dim) for part in parts]
        whole = torch.cat([part[block] for block in range(sharding.blocks) for part in blocks], dim)
        return whole[: self.vocab_size] if name in _BY_VOCABULARY else whole

    def _by_head(self, part: Tensor, kinds: int, ranks: int) -> Tensor:
        """Rows of a rank's query, key and value as ``[heads, kinds, width]``, which versions 0 and 1 had otherwise."""
        heads, rest = self.heads // ranks, part.shape[1:]
        if self.version >= 2:
            return part
        if self.version >= 1:
            return part.view(heads, self.width, kinds, *rest).transpose(1, 2).reshape(part.shape)
        return part.view(kinds, heads, self.width, *rest).transpose(0, 1).reshape(part.shape)


def _shape(name: str, stored: Parts, sharding: Sharding) -> list[int]:
    """Shape that the parts make together, a vocabulary's padding aside."""
    shape = list(stored[0].shape)
    for dim in sharding.split:
        if dim < len(shape):
            shape[dim] = sum(part.shape[dim] for part in stored)
    if name in _BY_VOCABULARY and shape[0] >= sharding.shape[0]:
        shape[0] = sharding.shape[0]
    return shape
