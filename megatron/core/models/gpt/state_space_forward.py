"""Mamba-2 in the forward pass of Megatron-LM's shards, token by token: the independent side of a proof."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.conversion.megatron_lm.forward import Layer, MegatronLMModel, Shard, pick

_EPSILON = 1e-5  # of the gated norm, whatever the arguments say


def state_space(x: Tensor, layer: Layer, *, model: MegatronLMModel) -> Tensor:
    """What a layer's heads make of ``x`` ``[b, s, h]``, summed over ranks (arXiv:2405.21060, section 7)."""
    return torch.stack([_of_rank(x, shard, model, len(layer.ranks)) for shard in layer.ranks]).sum(0)


def _of_rank(x: Tensor, shard: Shard, model: MegatronLMModel, ranks: int) -> Tensor:
    """A rank's heads and its part of the output matrix."""
    args = model.args
    states, head, groups = (
        args("mamba_state_dim", 128),
        args("mamba_head_dim", 64),
        args("mamba_num_groups", 8) // ranks,
    )
    heads = args("mamba_num_heads", 2 * args("hidden_size") // head) // ranks
    inner, shared = heads * head, groups * states
    gate, mixed, steps = torch.split(
        F.linear(x, _whole(shard, "in_proj.weight", "z x B C dt")), [inner, inner + 2 * shared, heads], dim=-1
    )
    taps = _whole(shard, "conv1d.weight", "x B C", "conv1d_weight").squeeze(1)
    rows = F.pad(mixed, (0, 0, taps.shape[1] - 1, 0))
    seen = torch.stack([rows[:, tap : tap + x.shape[1]] for tap in range(taps.shape[1])], dim=-1)
    mixed = F.silu((seen * taps).sum(-1) + _whole(shard, "conv1d.bias", "x B C", "conv1d_bias"))
    value, key, query = torch.split(mixed, [inner, shared, shared], dim=-1)
    key, query = (
        torch.unflatten(each, -1, (groups, states)).repeat_interleave(heads // groups, dim=2) for each in (key, query)
    )
    value, step = torch.unflatten(value, -1, (heads, head)), F.softplus(steps + _whole(shard, "dt_bias"))
    decay = torch.exp(-step * torch.exp(_whole(shard, "A_log")))
    state, found = x.new_zeros(len(x), heads, head, states), list[Tensor]()
    for token in range(x.shape[1]):
        given = (step[:, token, :, None] * value[:, token])[..., None] * key[:, token, :, None]
        state = decay[:, token, :, None, None] * state + given
        found.append((state * query[:, token, :, None]).sum(-1))
    out = torch.stack(found, dim=1) + _whole(shard, "D")[:, None] * value
    gated = torch.unflatten(out.flatten(2) * F.silu(gate), -1, (groups, -1))
    normed = gated / (gated.square().mean(-1, keepdim=True) + _EPSILON).sqrt()
    return F.linear(normed.flatten(2) * _whole(shard, "norm.weight"), _whole(shard, "out_proj.weight"))


def _whole(shard: Shard, name: str, components: str = "", other: str = "") -> Tensor:
    """A tensor of the mixer, which torch_dist has in components, and newer releases under an ``other`` name."""
    for known in filter(None, (name, other)):
        if (found := pick(shard, f"mixer.{known}")) is not None:
            return found
        parts = [pick(shard, f"mixer.{known}.{each}") for each in components.split()]
        if parts and all(part is not None for part in parts):
            return torch.cat([part for part in parts if part is not None])
    raise AssertionError(f"a layer with a mixer has {name}")
