"""What can be left out of a layer one by one: neurons, attention heads, experts, each with the rows that it owns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.core.moe.experts import Experts
from megatron.core.moe.layer import MoELayer, SharedExperts
from megatron.core.parallel.sharding import sharding_of
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.latent_attention import LatentAttention
from megatron.core.transformer.mlp import MLP

Kind = Literal["neurons", "heads", "experts", "neurons of experts", "neurons of shared experts"]
Places = Callable[[Tensor], Tensor]
"""From the units that are kept, in order, to the places of a dimension that they own."""


@dataclass(frozen=True)
class Unit:
    """Units of one ``kind`` in a module, ``count`` of them.

    ``read_by``: name of the weight that reads their results, ``width`` of its inputs for each. ``owns``: by name of a
    parameter, the dimension in which units own places, and which. Neurons of experts are chosen for each expert.
    ``groups``: of heads, each with equally many.
    """

    kind: Kind
    count: int
    read_by: str
    owns: Mapping[str, tuple[int, Places]]
    width: int = 1
    groups: int = 1

    @property
    def key(self) -> tuple[str, str]:
        """What tells the unit from all others of a model."""
        return self.kind, self.read_by


def units_of(model: nn.Module, config: ModelConfig) -> Iterator[Unit]:
    """The units of all modules of a model, or of a stage of it; weights may be on torch's meta device."""
    for name, module in model.named_modules():
        if isinstance(module, MLP):
            kind: Kind = "neurons of shared experts" if isinstance(module, SharedExperts) else "neurons"
            yield _with_own(model, _neurons(name, module, kind))
        elif isinstance(module, MoELayer):
            yield _with_own(model, _experts(name, module))
        elif isinstance(module, Experts):
            yield _with_own(model, _neurons_of_experts(name, module))
        elif isinstance(module, LatentAttention):
            yield _with_own(model, _latent_heads(name, config))
        elif isinstance(module, Attention):
            yield _with_own(model, _heads(name, config))


def _with_own(model: nn.Module, unit: Unit) -> Unit:
    """The unit without parameters that the model hasn't got."""
    names = {name for name, _ in model.named_parameters()}
    return replace(unit, owns={name: places for name, places in unit.owns.items() if name in names})


def _neurons(name: str, module: MLP, kind: Kind) -> Unit:
    """A gate's rows lie before those that it multiplies."""
    count = sharding_of(module.linear_fc2.weight).shape[1]
    matrices = sharding_of(module.linear_fc1.weight).shape[0] // count
    rows = partial(_in_each_part, parts=matrices, count=count)
    owns: dict[str, tuple[int, Places]] = {
        f"{name}.linear_fc1.weight": (0, rows),
        f"{name}.linear_fc1.bias": (0, rows),
        f"{name}.linear_fc2.weight": (1, _themselves),
    }
    return Unit(kind, count, f"{name}.linear_fc2.weight", owns)


def _experts(name: str, module: MoELayer) -> Unit:
    parameters = [f"experts.linear_{which}.{part}" for which in ("fc1", "fc2") for part in ("weight", "bias")]
    parameters += ["router.weight", "router.bias", "router.expert_bias"]
    count = sharding_of(module.router.weight).shape[0]
    owns = {f"{name}.{parameter}": (0, _themselves) for parameter in parameters}
    return Unit("experts", count, f"{name}.experts.linear_fc2.weight", owns)


def _neurons_of_experts(name: str, module: Experts) -> Unit:
    owns = {f"{name}.linear_{which}": (2, _themselves) for which in ("fc1.weight", "fc1.bias", "fc2.weight")}
    count = sharding_of(module.linear_fc2.weight).shape[2]
    return Unit("neurons of experts", count, f"{name}.linear_fc2.weight", owns)


def _heads(name: str, config: ModelConfig) -> Unit:
    """Query heads. A key/value head goes with the last of its queries."""
    heads, groups, width = config.num_attention_heads, config.num_query_groups, config.kv_channels
    of_head = partial(_blocks, width=width)
    of_group = partial(_blocks_of_groups, per_group=heads // groups, width=width)
    fused = partial(
        _rows_of_groups, per_group=heads // groups, width=width, query=width * (1 + config.attention_output_gate)
    )
    owns: dict[str, tuple[int, Places]] = {
        f"{name}.linear_qkv.weight": (0, fused),
        f"{name}.linear_qkv.bias": (0, fused),
        f"{name}.sinks": (0, _themselves),
        f"{name}.linear_proj.weight": (1, of_head),
    }
    if config.qk_layernorm_kind != "shared":
        owns |= {f"{name}.q_layernorm.weight": (0, of_head), f"{name}.k_layernorm.weight": (0, of_group)}
    return Unit("heads", heads, f"{name}.linear_proj.weight", owns, width, groups)


def _latent_heads(name: str, config: ModelConfig) -> Unit:
    """Heads that are computed from latents, which stay as wide as they are."""
    queries = partial(_blocks, width=config.kv_channels)
    keys_and_values = partial(_blocks, width=config.qk_head_dim + config.v_head_dim)
    owns: dict[str, tuple[int, Places]] = {
        f"{name}.linear_q_proj.weight": (0, queries),
        f"{name}.linear_q_up_proj.weight": (0, queries),
        f"{name}.linear_kv_up_proj.weight": (0, keys_and_values),
        f"{name}.sinks": (0, _themselves),
        f"{name}.linear_proj.weight": (1, partial(_blocks, width=config.v_head_dim)),
    }
    heads = config.num_attention_heads
    return Unit("heads", heads, f"{name}.linear_proj.weight", owns, config.v_head_dim, heads)


def _themselves(kept: Tensor) -> Tensor:
    return kept


def _in_each_part(kept: Tensor, *, parts: int, count: int) -> Tensor:
    return torch.cat([kept + part * count for part in range(parts)])


def _blocks(kept: Tensor, *, width: int) -> Tensor:
    return (kept.unsqueeze(1) * width + torch.arange(width)).flatten()


def _blocks_of_groups(kept: Tensor, *, per_group: int, width: int) -> Tensor:
    return _blocks(torch.tensor(_groups_of(kept, per_group)), width=width)


def _rows_of_groups(kept: Tensor, *, per_group: int, width: int, query: int) -> Tensor:
    """Rows of ``[q … q, k, v]`` of each group: ``query`` for a head, with its gate, and ``width`` for k and v each."""
    size, rows = per_group * query + 2 * width, list[Tensor]()
    for group in _groups_of(kept, per_group):
        heads = kept[kept // per_group == group] - group * per_group
        rows += [group * size + _blocks(heads, width=query), group * size + per_group * query + torch.arange(2 * width)]
    return torch.cat(rows)


def _groups_of(heads: Tensor, per_group: int) -> list[int]:
    return sorted({*(heads // per_group).tolist()})
