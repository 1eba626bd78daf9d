"""Mamba-2 in the forward pass of Megatron-LM's shards, token by token: the independent side of a proof."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.conversion.megatron_lm.forward import Layer, MegatronLMModel, Shard, pick

_EPSILON = 1e-5  # of the gated norm, whatever the arguments say


def state_space(x: Tensor, layer: Layer, *, model: MegatronLMModel) -> Tensor:
    """What a layer's heads make of ``x`` ``[b, s, h]``, summed over ranks (arXiv:2405.21060, section 7)."""
    return over_ranks(_of_rank, x, layer, model)


def over_ranks(
    of_rank: Callable[[Tensor, Shard, MegatronLMModel, int], Tensor], x: Tensor, layer: Layer, model: MegatronLMModel
) -> Tensor:
    """The sum of what ``of_rank`` gives for each rank's tensors, the model and the number of ranks."""
    return torch.stack([of_rank(x, shard, model, len(layer.ranks)) for shard in layer.ranks]).sum(0)


def seen_through(rows: Tensor, taps: Tensor) -> Tensor:
    """The causal convolution of ``rows`` [b, s, c] with ``taps`` [c, 1, k], each channel by itself."""
    taps, length = taps.squeeze(1), rows.shape[1]
    rows = F.pad(rows, (0, 0, taps.shape[1] - 1, 0))
    seen = torch.stack([rows[:, tap : tap + length] for tap in range(taps.shape[1])], dim=-1)
    return (seen * taps).sum(-1)


def _of_rank(x: Tensor, shard: Shard, model: MegatronLMModel, ranks: int) -> Tensor:
    """A rank's heads and its part of the output matrix."""
    args, mine = model.args, partial(whole, shard, module="mixer")
    states, head, groups = (
        args("mamba_state_dim", 128),
        args("mamba_head_dim", 64),
        args("mamba_num_groups", 8) // ranks,
    )
    heads = args("mamba_num_heads", 2 * args("hidden_size") // head) // ranks
    inner, shared = heads * head, groups * states
    gate, mixed, steps = torch.split(
        F.linear(x, mine("in_proj.weight", "z x B C dt")), [inner, inner + 2 * shared, heads], dim=-1
    )
    seen = seen_through(mixed, mine("conv1d.weight", "x B C", "conv1d_weight"))
    mixed = F.silu(seen + mine("conv1d.bias", "x B C", "conv1d_bias"))
    value, key, query = torch.split(mixed, [inner, shared, shared], dim=-1)
    key, query = (
        torch.unflatten(each, -1, (groups, states)).repeat_interleave(heads // groups, dim=2) for each in (key, query)
    )
    value, step = torch.unflatten(value, -1, (heads, head)), F.softplus(steps + mine("dt_bias"))
    decay = torch.exp(-step * torch.exp(mine("A_log")))
    state, found = x.new_zeros(len(x), heads, head, states), list[Tensor]()
    for token in range(x.shape[1]):
        given = (step[:, token, :, None] * value[:, token])[..., None] * key[:, token, :, None]
        state = decay[:, token, :, None, None] * state + given
        found.append((state * query[:, token, :, None]).sum(-1))
    out = torch.stack(found, dim=1) + mine("D")[:, None] * value
    gated = torch.unflatten(out.flatten(2) * F.silu(gate), -1, (groups, -1))
    normed = gated / (gated.square().mean(-1, keepdim=True) + _EPSILON).sqrt()
    return F.linear(normed.flatten(2) * mine("norm.weight"), mine("out_proj.weight"))


def whole(shard: Shard, name: str, components: str = "", other: str = "", *, module: str) -> Tensor:
    """A tensor of a mixer, which torch_dist has in components, and newer releases under an ``other`` name."""
    for known in (f"{module}.{each}" for each in (name, other) if each):
        if (found := pick(shard, known)) is not None:
            return found
        parts = [pick(shard, f"{known}.{each}") for each in components.split()]
        if parts and all(part is not None for part in parts):
            return torch.cat([part for part in parts if part is not None])
    raise AssertionError(f"a layer with a mixer has {name}")
