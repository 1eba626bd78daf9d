"""Which experts a token chooses, and how much each of them counts: functions of logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from megatron.config.moe import MoEConfig

_TINY = 1e-20  # keeps a sum of scores from being zero, as DeepSeek-V3 does


@dataclass(frozen=True)
class Routing:
    """``ids`` [t, k]: the experts that each of t tokens chooses, int64. ``weights`` [t, k]: theirs. ``kept`` [t, k]:
    choices that are neither dropped nor padding's; None: all.
    """

    ids: Tensor
    weights: Tensor
    kept: Tensor | None = None


def times_chosen(ids: Tensor, size: int) -> Tensor:
    """How often each number below ``size`` occurs in ``ids`` [n], int64 [size]; ``torch.bincount`` waits for a GPU."""
    return ids.new_zeros(size).scatter_add_(0, ids, torch.ones_like(ids))


def scores_of(logits: Tensor, moe: MoEConfig) -> Tensor:
    """Scores [t, E] of all experts, in fp32 or the type of ``logits``, if that is wider."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if moe.moe_router_score_function == "sigmoid":
        return logits.sigmoid()
    if moe.moe_router_score_function == "sqrtsoftplus":
        return functional.softplus(logits).sqrt()
    return logits.softmax(-1)


def shares_of(scores: Tensor, moe: MoEConfig) -> Tensor:
    """Scores that add up to 1 for each token: what balancing losses are about."""
    if moe.moe_router_score_function == "softmax":
        return scores
    return scores / (scores.sum(-1, keepdim=True) + _TINY)


@torch.no_grad()
def choose_experts(scores: Tensor, moe: MoEConfig, *, bias: Tensor | None = None, text: Tensor | None = None) -> Tensor:
    """The choices [t, k] of tokens with ``scores`` [t, E], to which ``bias`` [E] is added for the choice alone.

    ``text`` [t]: which of them aren't padding; None: all. What padding chooses has no meaning.
    """
    if moe.moe_router_force_load_balancing:
        turns = torch.arange(scores.shape[0], device=scores.device) if text is None else text.cumsum(0) - 1
        places = torch.arange(moe.moe_router_topk, device=scores.device)
        return (turns.unsqueeze(1) * moe.moe_router_topk + places) % scores.shape[1]
    return chosen(scores if bias is None else scores + bias, moe)


def weights_of(ids: Tensor, logits: Tensor, scores: Tensor, moe: MoEConfig) -> Tensor:
    """Weights [t, k] of the experts ``ids``, from ``logits`` [t, E] and their ``scores_of``.

    A softmax of the chosen logits equals the softmax of all, divided by the sum of the chosen ones.
    """
    if moe.moe_router_score_function == "softmax" and not moe.moe_router_pre_softmax:
        weights = logits.gather(1, ids).to(scores.dtype).softmax(-1)
    else:
        weights = scores.gather(1, ids)
        if moe.moe_router_score_function != "softmax" and moe.moe_router_topk > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
    factor = moe.moe_router_topk_scaling_factor
    return weights if factor is None else weights * factor


def chosen(scores: Tensor, moe: MoEConfig) -> Tensor:
    """Numbers [t, k] of the best experts, within the best groups where there are groups."""
    if moe.moe_router_num_groups is not None and moe.moe_router_group_topk is not None:
        groups = torch.unflatten(scores, -1, (moe.moe_router_num_groups, -1))
        of_group = groups.topk(moe.scores_of_group, dim=-1).values.sum(-1)
        kept = of_group.topk(moe.moe_router_group_topk, dim=-1).indices
        is_kept = torch.zeros_like(of_group, dtype=torch.bool).scatter_(1, kept, True)
        scores = groups.masked_fill(~is_kept.unsqueeze(-1), float("-inf")).flatten(-2)
    return scores.topk(moe.moe_router_topk, dim=-1).indices
