"""Gated delta nets in the forward pass of Megatron-LM's shards, token by token: the independent side of a proof."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.conversion.megatron_lm.forward import Layer, MegatronLMModel, Shard
from megatron.core.models.gpt.state_space_forward import over_ranks, seen_through, whole

_QKV = "query key value"


def delta_net(x: Tensor, layer: Layer, *, model: MegatronLMModel) -> Tensor:
    """What a layer's heads make of ``x`` ``[b, s, h]``, summed over ranks (arXiv:2412.06464, equation 10)."""
    return over_ranks(_of_rank, x, layer, model)


def _of_rank(x: Tensor, shard: Shard, model: MegatronLMModel, ranks: int) -> Tensor:
    """A rank's heads and its part of the output matrix."""
    args, mine = model.args, partial(whole, shard, module="self_attention")
    key_heads, heads = args("linear_num_key_heads", 16) // ranks, args("linear_num_value_heads", 32) // ranks
    keys, values = key_heads * args("linear_key_head_dim", 128), heads * args("linear_value_head_dim", 128)
    rows = F.linear(x, mine("in_proj.weight", f"{_QKV} z beta alpha"))
    mixed, z, beta, alpha = torch.split(rows, [2 * keys + values, values, heads, heads], dim=-1)
    mixed = F.silu(seen_through(mixed, mine("conv1d.weight", _QKV)))
    query, key, value = (
        torch.unflatten(each, -1, (count, -1))
        for each, count in zip(torch.split(mixed, [keys, keys, values], dim=-1), (key_heads, key_heads, heads))
    )
    query, key = (
        (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(heads // key_heads, dim=2)
        for each in (query, key)
    )
    rate, steps = torch.sigmoid(beta), F.softplus(alpha + mine("dt_bias"))
    decay = torch.exp(-torch.exp(mine("A_log")) * steps)
    state, found = x.new_zeros(len(x), heads, key.shape[-1], value.shape[-1]), list[Tensor]()
    for token in range(x.shape[1]):
        state = decay[:, token, :, None, None] * state
        missing = value[:, token] - torch.einsum("bhk,bhkv->bhv", key[:, token], state)
        state = state + torch.einsum("bhk,bhv->bhkv", key[:, token], rate[:, token, :, None] * missing)
        found.append(torch.einsum("bhk,bhkv->bhv", query[:, token], state) / key.shape[-1] ** 0.5)
    out, weight = torch.stack(found, dim=1), mine("out_norm.weight")
    weight = weight + 1 if args("apply_layernorm_1p", False) else weight
    normed = out / (out.square().mean(-1, keepdim=True) + args("norm_epsilon", 1e-5)).sqrt() * weight
    return F.linear(normed.flatten(2) * F.silu(z), mine("out_proj.weight"))
