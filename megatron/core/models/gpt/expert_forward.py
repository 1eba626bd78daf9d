"""Experts in the forward pass of Megatron-LM's shards: the independent side of a proof, as the rest of that pass is."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.conversion.megatron_lm.forward import Layer, MegatronLMModel, Shard, need, pick
from megatron.core.conversion.megatron_lm.saved_arguments import Arguments

_OF_EXPERT = (  # an expert's tensor: in a module of its own, in one for all of a rank, in torch_dist
    re.compile(r"mlp\.experts\.local_experts\.(?P<expert>\d+)\.(?P<name>.+)"),
    re.compile(r"mlp\.experts\.(?P<name>linear_fc[12]\.(?:weight|bias))(?P<expert>\d+)"),
    re.compile(r"mlp\.experts\.experts\.(?P<expert>\d+)\.(?P<name>.+)"),
)
_OF_ALL_EXPERTS = re.compile(r"mlp\.experts\.experts\.(linear_fc[12]\.(?:weight|bias))")


def _experts_of(shard: Shard, *, count: int, hidden: int) -> dict[int, dict[str, Tensor]]:
    """Each of a shard's ``count`` experts by its number there: tensors by their names in an MLP."""
    found: dict[int, dict[str, Tensor]] = {}
    for name, tensor in shard.items():
        if all_of_them := _OF_ALL_EXPERTS.fullmatch(name):
            for number, each in enumerate(tensor):
                found.setdefault(number, {})[all_of_them[1]] = each
        for place in filter(None, (pattern.fullmatch(name) for pattern in _OF_EXPERT)):
            found.setdefault(int(place["expert"]), {})[place["name"]] = tensor
    if (first := shard.get("mlp.experts.weight1")) is not None:  # one matrix, whose shape says nothing of how it lies
        second = shard["mlp.experts.weight2"].reshape(count, -1, hidden)
        for number, each in enumerate(first.reshape(count, hidden, -1)):
            found[number] = {"linear_fc1.weight": each.t(), "linear_fc2.weight": second[number].t()}
    return found


def experts(x: Tensor, layer: Layer, *, model: MegatronLMModel) -> Tensor:
    """What each token's experts make of ``x`` ``[b, s, h]``, weighted, and what shared experts do."""
    shard = layer.ranks[0]
    out = torch.zeros_like(x)
    logits = F.linear(x, need(shard, "router.weight"), pick(shard, "router.bias"))
    weights = _weights(logits, model.args, bias=pick(shard, "router.expert_bias"))
    for number, ranks in enumerate(_each_expert(layer, hidden=x.shape[-1])):
        chosen = weights[..., number].nonzero(as_tuple=True)
        if len(chosen[0]):
            made = model.network(x[chosen], ranks, ("linear_fc1",), ("linear_fc2",))
            out[chosen] += weights[..., number][chosen].unsqueeze(-1) * made
    if pick(shard, "shared_experts.linear_fc1.weight") is None:
        return out
    shared = model.network(x, layer.ranks, ("shared_experts.linear_fc1",), ("shared_experts.linear_fc2",))
    gate = pick(shard, "shared_experts.gate_weight")
    return out + (shared if gate is None else shared * torch.sigmoid(F.linear(x, gate)))


def _weights(logits: Tensor, args: Arguments, *, bias: Tensor | None) -> Tensor:
    """Weights of all experts ``[b, s, E]`` from the router's logits; zero for those that a token doesn't choose."""
    kind, chosen = args("moe_router_score_function", "softmax"), args("moe_router_topk", 2)
    is_after, groups, factor = kind == "softmax" and not args("moe_router_pre_softmax", False), 0, 1.0
    if args("moe_router_load_balancing_type", "") in ("sinkhorn", ["sinkhorn"]):
        kind, is_after = "sigmoid" if chosen == 1 else "softmax", False
    else:
        groups, factor = args("moe_router_num_groups", 0), args("moe_router_topk_scaling_factor", 1.0)
    each: dict[str, Callable[[Tensor], Tensor]] = {
        "softmax": partial(torch.softmax, dim=-1),
        "sigmoid": torch.sigmoid,
        "sqrtsoftplus": lambda x: F.softplus(x).sqrt(),
    }
    scores = logits if is_after else each[kind](logits)
    ranked = scores
    if bias is not None:
        ranked = ranked + bias
    if groups:
        kept = args("moe_router_group_topk")
        grouped = torch.unflatten(ranked, -1, (groups, -1))
        of_group = grouped.sort(-1, descending=True).values[..., : chosen // kept].sum(-1)
        last = of_group.sort(-1, descending=True).values[..., kept - 1 : kept]
        ranked = grouped.masked_fill((of_group < last).unsqueeze(-1), -torch.inf).flatten(-2)
    best = ranked.sort(-1, descending=True).indices[..., :chosen]
    mine = scores.gather(-1, best)
    if is_after:
        mine = mine.softmax(-1)
    elif kind != "softmax" and chosen > 1:
        mine = mine / (mine.sum(-1, keepdim=True) + 1e-20)
    return torch.zeros_like(logits).scatter(-1, best, mine * factor)


def _each_expert(layer: Layer, *, hidden: int) -> Iterator[list[Shard]]:
    """Expert after expert, the parts of its matrices on the ranks that split it, ``[out, in]`` each."""
    count = len(need(layer.ranks[0], "router.weight")) // len(layer.experts)
    for ranks in layer.experts:
        alone = [_experts_of(shard, count=count, hidden=hidden) for shard in ranks]
        for number in sorted(alone[0]):
            yield [each[number] for each in alone]
