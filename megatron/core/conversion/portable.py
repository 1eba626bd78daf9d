"""The common form of all conversions: a model's settings, and its logical tensors under our names, read when needed.

Each format has a reader that gives one and a writer that takes one, so any format converts to any other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.config.family import FamilyConfig, PartConfig
from megatron.config.flags import flags_of
from megatron.config.model import ModelConfig
from megatron.config.tokenizer import TokenizerConfig
from megatron.core.checkpointing.boxes import boxes
from megatron.core.checkpointing.manifest import listed
from megatron.core.files.remote_path import AnyPath
from megatron.core.models.registry import family_of
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.rng import RngStreams
from megatron.core.parallel.sharding import ShardedState, Sharding, sharded_parameters
from megatron.core.quantization.scheme import Scheme
from megatron.core.tokenizers.chat_settings import ChatSettings
from megatron.errors import CheckpointError, ConfigError


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that ``make`` reads and transforms; it is not kept."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]


@dataclass(frozen=True)
class LazyScales:
    """Scales of a quantized weight ``[out, in]``; experts have one dimension more in front, or two.

    ``factors``: ``[out, groups]``. Each output has its own row, also where all outputs or a block of them share one
    scale, so that transforms that move rows of the weight move those of its scales. ``zeros``: the codes of zero, int8
    in the same shape, where the grid isn't symmetric. ``groups``: ``[in]``, the group of each input, where they aren't
    neighbours. ``inputs``: ``[1]``, the scale of activations, where calibration found it.
    """

    factors: LazyTensor
    zeros: LazyTensor | None = None
    groups: LazyTensor | None = None
    inputs: LazyTensor | None = None


@dataclass(frozen=True)
class Quantization:
    """Which weights of a model lie on a grid, and its scales: their codes are exact, none is chosen anew.

    ``scales``: by our parameter names, of those that are quantized. ``method``: how scales and codes were chosen.
    ``calibration``: what the choice depended on (data, number of samples, seed), which files keep. ``cache``: FP8
    scales [1] of the keys and values that attention keeps, as ``….self_attention.k_scale`` and ``….v_scale``.
    """

    scheme: Scheme
    scales: Mapping[str, LazyScales]
    method: str = "rtn"
    calibration: Mapping[str, Any] = field(default_factory=dict)
    cache: Mapping[str, LazyTensor] = field(default_factory=dict)


@dataclass(frozen=True)
class PortableModel:
    """A model on its way from one format to another.

    ``model``: its architecture, vocabulary size included. ``groups``: all groups of settings that its family has,
    which identify the family. ``tensors``: by our parameter names, in logical shape.
    ``tokenizer``: how its tokenizer is built, from the paths where the files are now. ``companions``: files that
    travel along (the tokenizer's, generation settings), by name. ``notes``: lines about the source, for its user.
    ``chat``: how it writes conversations and ends answers, where that is known.
    ``quantization``: of weights that lie on a grid; ``tensors`` are then the numbers that codes and scales stand for.
    """

    model: ModelConfig
    tensors: Mapping[str, LazyTensor]
    tokenizer: TokenizerConfig
    seq_length: int
    companions: Mapping[str, AnyPath] = field(default_factory=dict)
    groups: tuple[object, ...] = ()
    iteration: int = 0
    consumed_samples: int = 0
    notes: tuple[str, ...] = ()
    chat: ChatSettings | None = None
    quantization: Quantization | None = None

    def __post_init__(self) -> None:
        """Leave out settings of what a run adds to a model and this one hasn't got: no other program knows them."""
        object.__setattr__(self, "groups", tuple(each for each in self.groups if not _is_off(each)))

    @property
    def dtype(self) -> torch.dtype:
        """The type of most numbers."""
        sizes: dict[torch.dtype, int] = {}
        for tensor in self.tensors.values():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + int(torch.Size(tensor.shape).numel())
        return max(sizes, key=lambda dtype: sizes[dtype])

    @property
    def num_layers(self) -> int:
        """Layers of all stacks."""
        return layers_of(self.model, self.groups)

    @property
    def num_parameters(self) -> int:
        """Numbers of all tensors together."""
        return sum(int(torch.Size(tensor.shape).numel()) for tensor in self.tensors.values())


def refuse_quantized(portable: PortableModel, where: str, *, what: str) -> None:
    """Raise CheckpointError for a model whose weights lie on a grid. ``what``: why it can't serve."""
    if portable.quantization is not None:
        found = portable.quantization
        raise CheckpointError(
            f"{where} is quantized ({found.scheme.name} by {found.method}), and {what}: take the checkpoint that it "
            "was made of"
        )


def _is_off(group: object) -> bool:
    return isinstance(group, PartConfig) and group.is_added and group == type(group)()


def layers_of(model: ModelConfig, groups: Sequence[object]) -> int:
    """Layers of all stacks of a model. ``groups``: settings of its family alone."""
    own = next((group for group in groups if isinstance(group, FamilyConfig)), FamilyConfig())
    return sum(own.stacks(model))


def refuse_out_of_bounds(groups: Iterable[object], names: Mapping[str, str], *, where: str) -> None:
    """Raise CheckpointError for a value that no checkpoint here may have. ``names``: what ``where`` calls a field."""
    for group in groups:
        for spec in flags_of(type(group)):
            if wrong := spec.out_of_bounds(getattr(group, spec.field)):
                raise CheckpointError(
                    f"{where}: {wrong.replace(spec.positive, names.get(spec.field, spec.positive), 1)}"
                )


def refuse_larger_weights(
    model: ModelConfig, groups: Sequence[object], tensors: Mapping[str, LazyTensor], *, where: str
) -> None:
    """Raise CheckpointError for settings of which one weight is larger than all tensors that a source holds.

    Whatever follows may then take memory for the rows of each weight.
    """
    try:
        shapes = [sharding.shape for sharding in parameters_of(model, groups).values()]
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from None
    largest, held = max(shapes, key=math.prod), sum(math.prod(tensor.shape) for tensor in tensors.values())
    if math.prod(largest) > held:
        sizes = " x ".join(f"{size:,}" for size in largest)
        raise CheckpointError(f"{where} describes a weight of {sizes} numbers, and all tensors together have {held:,}")


def parameters_of(model: ModelConfig, groups: Sequence[object] = ()) -> dict[str, Sharding]:
    """Our parameters of a model by name, as the model itself declares them; nothing is allocated.

    ``groups``: settings of its family alone, which identify the family.
    """
    mesh, cpu = Mesh.single(), torch.device("cpu")
    context = ModelContext(mesh=mesh, rng=RngStreams(1, mesh, cpu), device=torch.device("meta"), dtype=torch.float32)
    whole = family_of(groups).train_spec.build_model(model, groups, context)
    return {name: sharding for name, _, sharding in sharded_parameters(whole)}


def load_weights(model: nn.Module, portable: PortableModel, mesh: Mesh) -> None:
    """Copy this rank's part of each tensor into ``model``, a stage of the same architecture, in the model's type."""
    parts = ((sharding.tied or name, parameter, sharding) for name, parameter, sharding in sharded_parameters(model))
    fill((ShardedState(name, parameter.detach(), sharding) for name, parameter, sharding in parts), portable, mesh)


@torch.no_grad()
def fill(state: Iterable[ShardedState], portable: PortableModel, mesh: Mesh) -> None:
    """Copy this rank's part of each tensor into ``state``, whose names end with those of parameters: ``model.NAME``,
    and ``optimizer.fp32_param.NAME`` of its master weights. Each tensor is read once, and is then in memory alone.

    Padding of the vocabulary becomes zero: whatever else it were would be in products of the backward pass.
    """
    parts: dict[str, list[ShardedState]] = {}
    for part in state:
        name = part.name.removeprefix("model.").removeprefix("optimizer.fp32_param.")
        parts.setdefault(name, []).append(part)
    for name, same in parts.items():
        logical = portable.tensors[name].make()
        for part in same:
            flat = part.tensor.view(-1).zero_()
            for box in boxes(part.sharding, mesh, flat_range=part.flat_range):
                there = logical[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes))]
                flat.as_strided(box.sizes, box.strides, flat.storage_offset() + box.start).copy_(there)
            if part.after_load is not None:
                part.after_load()


def fitted(portable: PortableModel, model: ModelConfig, groups: Sequence[object], *, where: str) -> PortableModel:
    """The portable model with the vocabulary size of ``model``, which is otherwise of the same architecture.

    New rows are the mean of those that are there, as in transformers (but for its noise): new tokens then get about the
    probability of an average one, and the others nearly keep theirs (Hewitt 2021). Surplus rows are cut. Raises
    CheckpointError for another number of learned positions. ``where``: the source, for messages.
    """
    resized = dataclasses.replace(portable.model, vocab_size=model.vocab_size)
    wanted, resizable = parameters_of(model, groups), parameters_of(resized, portable.groups)
    tensors = dict(portable.tensors)
    for name, tensor in portable.tensors.items():
        if wanted[name].shape != resizable[name].shape:
            raise CheckpointError(
                f"--max-position-embeddings {model.max_position_embeddings}: {where} has learned "
                f"{portable.model.max_position_embeddings} positions ({name}), and others cannot be derived from them; "
                "leave the flag out, and give a --seq-length of at most as many"
            )
        if wanted[name].shape != tensor.shape:
            tensors[name] = dataclasses.replace(
                tensor, shape=wanted[name].shape, make=partial(_resized, tensor, wanted[name].shape[0])
            )
    return dataclasses.replace(portable, model=resized, tensors=tensors)


def _resized(tensor: LazyTensor, rows: int) -> Tensor:
    there = tensor.make()
    new = max(rows - len(there), 0)
    mean = there.mean(0, keepdim=True, dtype=torch.promote_types(there.dtype, torch.float32)).to(there.dtype)
    return torch.cat([there[:rows], mean.expand(new, *there.shape[1:])])


def refuse_more_layers(model: ModelConfig, groups: Sequence[object], tensors: Collection[str], *, where: str) -> None:
    """Raise CheckpointError for more layers than there are ``tensors``, before a billion of them are built."""
    layers = layers_of(model, groups) + sum(part.own_layers for part in groups if isinstance(part, PartConfig))
    if layers > len(tensors):
        raise CheckpointError(f"{where} describes {layers:,} layers, and there are {len(tensors):,} tensors in all")


def check_shapes(found: Mapping[str, Sequence[int]], wanted: Mapping[str, Sequence[int]], *, where: str) -> None:
    """Raise CheckpointError that names the tensors which a source lacks, has too many of, or has in another shape."""
    problems = {
        "missing": sorted(wanted.keys() - found.keys()),
        "not part of this architecture": sorted(found.keys() - wanted.keys()),
        "of another shape": [
            f"{name} is {list(found[name])} and should be {list(shape)}"
            for name, shape in wanted.items()
            if name in found and list(found[name]) != list(shape)
        ],
    }
    if parts := [f"{title}: {listed(names)}" for title, names in problems.items() if names]:
        raise CheckpointError(
            f"{where} does not hold the tensors that its settings describe: {'; '.join(parts)}. Download it again if "
            "it is incomplete, or correct its settings"
        )
