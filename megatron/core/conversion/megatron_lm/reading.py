"""Checkpoints of Megatron-LM as portable models: shards of its torch format, and its torch_dist format."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron.core.conversion.chat_files import read_chat
from megatron.core.conversion.companions import FOLDER, companions_in, tokenizer_files, tokenizer_of
from megatron.core.conversion.megatron_lm.arguments import (
    check_is_known,
    model_from_arguments,
    tokenizer_from_arguments,
)
from megatron.core.conversion.megatron_lm.files import DistFiles, ShardFiles, StageFiles, open_checkpoint
from megatron.core.conversion.megatron_lm.format import MegatronLMFormat, family_among, format_of
from megatron.core.conversion.megatron_lm.names import (
    LAYER,
    WORDS,
    components_of,
    depths_of,
    expert_number,
    is_legacy,
    is_of_experts,
    is_weight,
)
from megatron.core.conversion.megatron_lm.output_gates import GATED, gates_behind_queries
from megatron.core.conversion.portable import LazyTensor, PortableModel, check_shapes, parameters_of
from megatron.core.models.registry import Family, with_all_groups
from megatron.core.parallel.sharding import Sharding
from megatron.errors import CheckpointError

EMBEDDING = WORDS.ours
_BY_VOCABULARY = (EMBEDDING, "output_layer.weight", "output_layer.bias")
_HALVES = ("_w", "_v")  # gates and values
_DOWN = re.compile(r"\.linear_(q|kv)_down_proj\.")
_IN_ONE = re.compile(r"experts\.weight[12]")
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
    check_is_known(files.args, family.settings, has_latest_layers=theirs.has_latest_layers)
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
    groups = with_all_groups(theirs.groups_from_arguments(files.args, model, stored, legacy=legacy))
    default_tensors = theirs.default_tensors({name: held[0] for name, held in stored.items()})
    stored = {name: (tensor,) for name, tensor in default_tensors.items()} | stored
    wanted = parameters_of(model, groups)
    stored = {
        name: [_with_matrices(name, part, wanted[name]) for part in held] if name in wanted else held
        for name, held in stored.items()
    }
    shapes = {name: _shape(name, held, wanted[name]) if name in wanted else [] for name, held in stored.items()}
    check_shapes(shapes, {name: sharding.shape for name, sharding in wanted.items()}, where=str(files.folder))
    gated = gates_behind_queries(model).argsort() if model.attention_output_gate else None
    merge = _Merge(model.num_attention_heads, model.kv_channels, files.version, vocab_size, gated)
    chat, _ = read_chat(companions_in(files.folder.parent / FOLDER), tokenizer, rows=vocab_size)
    tensors = {
        name: LazyTensor(sharding.shape, stored[name][0].dtype, partial(merge.join, name, stored[name], sharding))
        for name, sharding in wanted.items()
    }
    return PortableModel(
        model=model,
        groups=groups,
        tensors=theirs.tensors_to_read(tensors, model, groups),
        tokenizer=tokenizer,
        seq_length=min(files.args("seq_length", model.max_position_embeddings), model.max_position_embeddings),
        companions=tokenizer_files(tokenizer),
        iteration=files.iteration,
        consumed_samples=files.args("consumed_train_samples", 0),
        notes=theirs.notes(files.args),
        chat=chat,
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
    names, replicated = format_of(family).names_in(files.args), format_of(family).replicated
    found: dict[str, Parts] = {}
    first_layers: dict[str, int] = {}
    for stage in files.stages:
        next_layers = dict(first_layers)
        of_experts: dict[str, list[str]] = {}
        for theirs in filter(is_weight, stage.ranks[0]):
            ours = names.our_name(theirs, first_layers=first_layers)
            if ours is None:
                raise _unknown(theirs, files.folder, family)
            if ours == "output_layer.weight" and not files.args("untie_embeddings_and_output_weights", False):
                continue  # the last stage's copy of tied embeddings
            if layer := LAYER.match(ours):
                next_layers[layer[1]] = max(next_layers.get(layer[1], 0), int(layer[2]) + 1)
            if is_of_experts(ours):
                of_experts.setdefault(ours, []).append(theirs)
                continue
            if ours in replicated and len(files.stages) > 1:
                raise CheckpointError(
                    f"{files.folder} has relative positions in pipeline stages, and each stage trained its own "
                    "tables: convert a torch_dist checkpoint"
                )
            shards = stage.ranks[:1] if ours in replicated else stage.ranks
            found[ours] = _alike(
                theirs, {f"{files.folder}: tensor-parallel rank {rank}": shard for rank, shard in enumerate(shards)}
            )
        for ours, members in of_experts.items():
            found[ours] = _experts(members, stage, files)
        first_layers = next_layers
    return found


def _alike(theirs: str, shards: Mapping[str, Mapping[str, Tensor]]) -> Parts:
    """A tensor of each of the ``shards``, which are named; CheckpointError for one that is missing or has another shape
    than the first.
    """
    found: list[LazyTensor] = []
    for rank, shard in shards.items():
        if theirs not in shard:
            raise CheckpointError(f"{rank} lacks {theirs}: copy the whole checkpoint again")
        tensor = shard[theirs]
        if found and found[0].shape != tuple(tensor.shape):
            raise CheckpointError(
                f"{theirs} is {list(tensor.shape)} in {rank} and {list(found[0].shape)} in the first: the files are of "
                "different checkpoints"
            )
        found.append(LazyTensor(tuple(tensor.shape), tensor.dtype, tensor.detach))
    return found


def _experts(members: Sequence[str], stage: StageFiles, files: ShardFiles) -> Parts:
    """All experts of a layer as the parts into which ranks split them. ``members``: names of a rank's own."""
    members = sorted(members, key=lambda name: expert_number(name) or 0)
    found = []
    for part in range(len(stage.experts[0])):
        holders = {
            f"{files.folder}: expert-parallel rank {rank}, part {part} of each expert,": shards[part]
            for rank, shards in enumerate(stage.experts)
        }
        by_member = [_alike(theirs, holders) for theirs in members]
        if by_member[0][0].shape != by_member[-1][0].shape:
            raise CheckpointError(
                f"{files.folder}: {members[0]} and {members[-1]} have different shapes, and experts are all alike"
            )
        if _IN_ONE.search(members[0]):
            of_rank = partial(_viewed, name=members[0], stage=stage, folder=files.folder)
            found.append(_stacked([of_rank(each) for each in by_member[0]], torch.cat))
        else:
            found.append(_stacked([each[rank] for rank in range(len(stage.experts)) for each in by_member]))
    return found


def _stacked(experts: Sequence[LazyTensor], join: Callable[[list[Tensor]], Tensor] = torch.stack) -> LazyTensor:
    """One tensor of all, along a new first dim; or, joined by torch.cat, along the first dim that is there."""

    def make() -> Tensor:
        return join([expert.make() for expert in experts])

    first = experts[0].shape
    shape = (len(experts), *first) if join is torch.stack else (len(experts) * first[0], *first[1:])
    return LazyTensor(shape, experts[0].dtype, make)


def _below_each_other(parts: Sequence[LazyTensor]) -> LazyTensor:
    """Tensors with different numbers of rows as one."""
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    return LazyTensor(shape, parts[0].dtype, lambda: torch.cat([part.make() for part in parts]))


def _viewed(matrix: LazyTensor, *, name: str, stage: StageFiles, folder: Path) -> LazyTensor:
    """The experts of a rank in one matrix, as the grouped experts of before core 0.13 have it, each ``[out, in]``.

    The first matrices lie as ``[experts, h, out]``, whatever the shape in the file, the second ones as ``[experts, in,
    h]``. How many there are, the router's shape says.
    """
    router = stage.ranks[0].get(_IN_ONE.sub("router.weight", name))
    if router is None:
        raise CheckpointError(f"{folder} holds {name} and no router beside it: copy the whole checkpoint again")
    experts, hidden = len(router) // len(stage.experts), router.shape[1]
    numbers = int(torch.Size(matrix.shape).numel())
    inner = numbers // max(experts * hidden, 1)
    if inner * experts * hidden != numbers:
        raise CheckpointError(
            f"{folder}: {name} has {numbers} numbers, which don't divide into equal matrices for the {experts} experts "
            "of its router: copy the checkpoint again"
        )
    lying = (experts, hidden, inner) if name.endswith("weight1") else (experts, inner, hidden)
    turned = (lying[0], lying[2], lying[1])
    return LazyTensor(turned, matrix.dtype, lambda: matrix.make().reshape(lying).transpose(1, 2))


def _unknown(name: str, folder: Path, family: Family) -> CheckpointError:
    return CheckpointError(f"{folder} holds {name}, which is not a known tensor of a {family.title}")


def _parts_of_dist(files: DistFiles, family: Family) -> dict[str, Parts]:
    """Our names, each one part: torch_dist holds logical tensors, with layers stacked unless they differ.

    Since core 0.14 a tensor may be in two halves, gates and values, and each expert in tensors of its own.
    """
    names, stored = format_of(family).names_in(files.args), files.stored
    found: dict[str, Parts] = {}
    pieces: dict[str, dict[tuple[int, str], LazyTensor]] = {}
    components: dict[str, dict[str, LazyTensor]] = {}
    for key, entry in stored.entries.items():
        before, _, component = key.rpartition(".")
        if component and component in components_of(stacked := names.our_name(before) or ""):
            components.setdefault(stacked, {})[component] = LazyTensor(
                entry.shape, entry.dtype, partial(stored.read, key)
            )
            continue
        if not is_weight(key) or key.split(".")[0] not in names.roots:
            continue  # optimizer and random states
        whole, half = key.removesuffix("_w").removesuffix("_v"), key[-2:] if key[-2:] in _HALVES else ""
        layers = names.our_names_of_stack(whole, entry.shape[0] if entry.shape else 0)
        ours = names.our_name(whole)
        if layers is not None:
            for number, name in enumerate(layers):
                piece = LazyTensor(entry.shape[1:], entry.dtype, partial(stored.read, key, at=number))
                pieces.setdefault(name, {})[-1, half] = piece
        elif ours is not None:
            expert = expert_number(whole)
            piece = LazyTensor(entry.shape, entry.dtype, partial(stored.read, key))
            pieces.setdefault(ours, {})[-1 if expert is None else expert, half] = piece
        else:
            raise _unknown(key, files.folder, family)
    for name, held in components.items():
        if absent := [each for each in components_of(name) if each not in held]:
            raise CheckpointError(f"{files.folder} lacks {absent[0]} of {name}: copy the whole checkpoint again")
        found[name] = [_below_each_other([held[each] for each in components_of(name)])]
    for name, each in pieces.items():
        numbers = sorted({number for number, _ in each})
        halves = sorted({half for _, half in each}, reverse=True)
        lacking = [(number, half) for number in numbers for half in halves if (number, half) not in each]
        if lacking or (len(halves) > 1 and halves != [*_HALVES]) or halves[0] == "_v":
            raise CheckpointError(f"{files.folder} holds a part of {name} only: copy the whole checkpoint again")
        parts = [
            each[number, ""] if halves == [""] else _stacked([each[number, half] for half in _HALVES], torch.cat)
            for number in numbers
        ]
        found[name] = parts if numbers == [-1] else [_stacked(parts)]
    return found


@dataclass(frozen=True)
class _Merge:
    """How parts become a tensor: what their order of query, key and value is, and where padding begins.

    ``gated``: the rows of a matrix of queries with gates, in our order.
    """

    heads: int
    width: int
    version: float
    vocab_size: int
    gated: Tensor | None

    def join(self, name: str, stored: Parts, sharding: Sharding) -> Tensor:
        """The logical tensor."""
        parts = [part.make() for part in stored]
        for matrix, kinds in _FUSED.items():
            if matrix in name:
                parts = [self._by_head(part, kinds, len(parts)) for part in parts]
        dim = _split_dim(name, parts[0].shape, sharding)
        if dim is None:
            return parts[0]
        if sharding.parts:  # such as gates and values: all ranks' part of the first, then those of the next
            rows = [stacked.local_rows(len(parts)) for stacked in sharding.parts]
            parts = [each for stacked in zip(*(torch.split(part, rows, dim) for part in parts)) for each in stacked]
        whole = torch.cat(parts, dim)
        if self.gated is not None and GATED in name:
            return whole[self.gated]
        return whole[: self.vocab_size] if name in _BY_VOCABULARY else whole

    def _by_head(self, part: Tensor, kinds: int, ranks: int) -> Tensor:
        """Rows of a rank's query, key and value as ``[heads, kinds, width]``, which versions 0 and 1 had otherwise."""
        heads, rest = self.heads // ranks, part.shape[1:]
        if self.version >= 2:
            return part
        if self.version >= 1:
            return part.view(heads, self.width, kinds, *rest).transpose(1, 2).reshape(part.shape)
        return part.view(kinds, heads, self.width, *rest).transpose(0, 1).reshape(part.shape)


def _split_dim(name: str, part: Sequence[int], sharding: Sharding) -> int | None:
    """The dim along which ranks split a tensor, of which this is the shape of a ``part``; None for one that each has.

    All experts are here, so the ranks that share them out don't count. Megatron-LM splits the rows of ``eh_proj``, and
    those of the matrices that make latents where it doesn't run Transformer Engine.
    """
    if ".eh_proj." in name or (_DOWN.search(name) and len(part) and part[0] < sharding.shape[0]):
        return 0
    split = [dim for dim, axis in sharding.split.items() if axis != "ep"]
    return split[0] if split else None


def _shape(name: str, stored: Parts, sharding: Sharding) -> list[int]:
    """Shape that the parts make together, a vocabulary's padding aside."""
    shape = list(stored[0].shape)
    dim = _split_dim(name, shape, sharding)
    if dim is not None and dim < len(shape):
        shape[dim] = sum(part.shape[dim] for part in stored)
    if name in _BY_VOCABULARY and shape[0] >= sharding.shape[0]:
        shape[0] = sharding.shape[0]
    return shape


def _with_matrices(name: str, part: LazyTensor, sharding: Sharding) -> LazyTensor:
    """The first matrices of experts ``[E, rows, …]`` as ``[E, gate and value or one, rows, …]``; others as they are."""
    if not (is_of_experts(name) and ".linear_fc1." in name) or len(part.shape) < 2:
        return part
    matrices = sharding.shape[1]
    if part.shape[1] % matrices:
        return part
    shape = (part.shape[0], matrices, part.shape[1] // matrices, *part.shape[2:])
    return LazyTensor(shape, part.dtype, lambda: torch.unflatten(part.make(), 1, (matrices, -1)))
