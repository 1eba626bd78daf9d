"""A smaller model: the channels, units and layers of a model that matter most, in their order.

Each tensor is an index selection of one of the larger model's, so what is kept keeps its bits.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron.core.conversion.portable import LazyTensor, PortableModel, check_shapes, parameters_of
from megatron.core.models.gpt.pruning.importance import Importance
from megatron.core.models.gpt.pruning.targets import Targets, refuse_layers_without, with_sizes
from megatron.core.models.gpt.pruning.units import Kind, Unit, units_of
from megatron.core.models.registry import family_of
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.rng import RngStreams

_LAYER = re.compile(r"(decoder\.layers\.)(\d+)(\..*)")
_SIZES: Mapping[Kind, str] = {
    "neurons": "ffn_hidden_size",
    "experts": "num_experts",
    "neurons of experts": "moe_ffn_hidden_size",
    "neurons of shared experts": "moe_shared_expert_intermediate_size",
}


@dataclass(frozen=True)
class Pruned:
    """A smaller model, and what it keeps: numbers of ``layers``, of ``channels`` of hidden states, and of units by
    ``Unit.key``, [kept], or [experts, kept] for neurons of experts.
    """

    model: PortableModel
    layers: tuple[int, ...]
    channels: Tensor
    units: Mapping[tuple[str, str], Tensor]


def pruned(portable: PortableModel, targets: Targets, importance: Importance) -> Pruned:
    """The model with what matters most. Raises MegatronError as ``Targets.sizes``, and for layers of which a kind that
    is needed would be missing.
    """
    sizes = targets.sizes(portable)
    layers = _layers(portable, targets, importance, sizes["num_layers"])
    channels = most_important(importance.channels, sizes["hidden_size"])
    refuse_layers_without(portable, layers)
    small = with_sizes(portable, sizes, layers)
    cuts, units = dict[str, list[tuple[int, Tensor]]](), dict[tuple[str, str], Tensor]()
    for unit in _units(portable):
        scores = importance.units.get(unit.key)
        if scores is None:  # nothing was measured: all units stay
            continue
        kept = units[unit.key] = _kept(unit, scores, sizes)
        if kept.shape[-1] < unit.count:
            for name, (dim, places) in unit.owns.items():
                cuts.setdefault(name, []).append((dim, places(kept)))
    if len(channels) < portable.model.hidden_size:
        for name, dims in _hidden_dims(portable, small).items():
            cuts.setdefault(name, []).extend((dim, _repeated(channels, portable, name, dim)) for dim in dims)
    renamed = {old: new for new, old in enumerate(layers)}
    tensors = dict[str, LazyTensor]()
    for name, tensor in portable.tensors.items():
        found = _LAYER.fullmatch(name)
        if found is None:
            tensors[name] = _cut(tensor, cuts.get(name, ()))
        elif int(found[2]) in renamed:
            tensors[f"{found[1]}{renamed[int(found[2])]}{found[3]}"] = _cut(tensor, cuts.get(name, ()))
    wanted = {name: sharding.shape for name, sharding in parameters_of(small.model, small.groups).items()}
    check_shapes({name: tensor.shape for name, tensor in tensors.items()}, wanted, where="the pruned model")
    ordered = {name: tensors[name] for name in wanted}
    return Pruned(dataclasses.replace(small, tensors=ordered), layers, channels, units)


def most_important(scores: Tensor, count: int) -> Tensor:
    """The numbers of the ``count`` largest scores of each row, in order; of equal ones the first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count].sort(dim=-1).values


def heads_of_groups(scores: Tensor, *, groups: int, heads: int, kept_groups: int) -> Tensor:
    """The query ``heads`` that are kept, in order: equally many of each of ``kept_groups`` of the ``groups``, which
    are those whose kept heads have the largest norm.
    """
    by_group = scores.view(groups, -1)
    best = most_important(by_group, heads // kept_groups)
    of_group = torch.linalg.vector_norm(by_group.gather(1, best), dim=1)
    chosen = most_important(of_group, kept_groups)
    return (best[chosen] + chosen.unsqueeze(1) * by_group.shape[1]).flatten()


def _layers(portable: PortableModel, targets: Targets, importance: Importance, count: int) -> tuple[int, ...]:
    if targets.drop:
        return tuple(layer for layer in range(portable.model.num_layers) if layer not in targets.drop)
    return tuple(most_important(importance.layers, count).tolist())


def _kept(unit: Unit, scores: Tensor, sizes: Mapping[str, int]) -> Tensor:
    if unit.kind != "heads":
        return most_important(scores, sizes[_SIZES[unit.kind]])
    heads, groups = sizes["num_attention_heads"], sizes["num_query_groups"]
    return heads_of_groups(scores, groups=unit.groups, heads=heads, kept_groups=groups)


def _units(portable: PortableModel) -> list[Unit]:
    mesh, cpu = Mesh.single(), torch.device("cpu")
    context = ModelContext(mesh=mesh, rng=RngStreams(1, mesh, cpu), device=torch.device("meta"), dtype=torch.float32)
    model = family_of(portable.groups).train_spec.build_model(portable.model, portable.groups, context)
    return [*units_of(model, portable.model)]


def _hidden_dims(portable: PortableModel, small: PortableModel) -> dict[str, list[int]]:
    """The dimensions of parameters that follow the hidden size: those that change with it alone."""
    narrow = with_sizes(portable, {"hidden_size": small.model.hidden_size}, range(portable.model.num_layers))
    before, after = (parameters_of(each.model, each.groups) for each in (portable, narrow))
    return {
        name: [dim for dim, (old, new) in enumerate(zip(before[name].shape, after[name].shape)) if old != new]
        for name in before
    }


def _repeated(channels: Tensor, portable: PortableModel, name: str, dim: int) -> Tensor:
    """The places of ``channels`` in a dimension that has all of them once or several times, one after the other."""
    hidden = portable.model.hidden_size
    return torch.cat([channels + first for first in range(0, portable.tensors[name].shape[dim], hidden)])


def _cut(tensor: LazyTensor, cuts: Sequence[tuple[int, Tensor]]) -> LazyTensor:
    if not cuts:
        return tensor
    shape = list(tensor.shape)
    for dim, places in cuts:
        shape[dim] = places.shape[-1]
    return dataclasses.replace(tensor, shape=tuple(shape), make=partial(_made, tensor, cuts))


def _made(tensor: LazyTensor, cuts: Sequence[tuple[int, Tensor]]) -> Tensor:
    """Places of experts, [experts, kept], come before any that leave experts out."""
    made = tensor.make()
    for dim, places in sorted(cuts, key=lambda cut: -cut[1].dim()):
        if places.dim() == 1:
            made = made.index_select(dim, places)
        else:
            made = torch.stack([each.index_select(dim - 1, own) for each, own in zip(made, places, strict=True)])
    return made.contiguous()
