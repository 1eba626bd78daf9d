"""Which choices of experts are dropped when an expert has more than its capacity in a sequence.

Capacity is that of a sequence, not of the tokens of a rank as in Megatron-LM: all layouts drop the same choices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.config.moe import MoEConfig
from megatron.core.context_parallel.slicing import by_rank, in_order
from megatron.core.parallel.collectives import all_gather
from megatron.core.parallel.context import ParallelContext

_WEIGHT_STEP = 2.0**-20
"""Weights are compared in multiples of it. Equal tokens at one place of two documents have equal weights but for
rounding, which depends on the layout and would decide which of them is dropped.
"""


@torch.no_grad()
def within_capacity(ids: Tensor, weights: Tensor, moe: MoEConfig, context: ParallelContext, *, batch: int) -> Tensor:
    """Whether each choice ``ids`` [s·b, k] of this rank's tokens, position by position, is kept, [s·b, k].

    The number of experts in place of one's: a choice of a row of padding, which isn't kept and adds nothing to the
    capacity of its sequence. Of each expert in each sequence, as many as its capacity: those of the largest
    ``weights``, the earlier position first where these are equal, or by ``--moe-token-drop-policy position`` those of
    the earliest positions. A small collective of the ranks that divide the sequence.
    """
    assert moe.moe_expert_capacity_factor is not None
    experts, mesh = moe.num_experts or 1, context.mesh
    both = torch.stack((ids.to(weights.dtype), weights), dim=-1)  # expert numbers are exact in any of the types
    both = both.view(-1, batch, *both.shape[1:])  # [s, b, k, 2]
    if context.splits_sequence:
        both = all_gather(both, mesh, "tp")
    whole = in_order(all_gather(both.unsqueeze(0).contiguous(), mesh, "cp"))  # [S, b, k, 2]
    length, _, choices, _ = whole.shape
    rows = whole.transpose(0, 1).flatten(1, 2)  # [b, S·k, 2]
    of_expert, weight = rows[..., 0].long(), rows[..., 1]
    is_text = of_expert < experts
    capacity = (is_text.sum(1, keepdim=True).double() / experts * moe.moe_expert_capacity_factor).ceil()  # [b, 1]
    if moe.moe_token_drop_policy == "probs":
        order = (weight / _WEIGHT_STEP).round().argsort(dim=1, descending=True, stable=True)
    else:
        order = torch.arange(rows.shape[1], device=ids.device).expand(batch, -1)
    order = order.gather(1, of_expert.gather(1, order).argsort(dim=1, stable=True))  # by expert, the best first
    sorted_experts = of_expert.gather(1, order)
    counts = torch.zeros(batch, experts + 1, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(1, of_expert, torch.ones_like(of_expert))
    starts = counts.cumsum(1) - counts
    place = torch.arange(rows.shape[1], device=ids.device) - starts.gather(1, sorted_experts)
    kept = torch.zeros_like(of_expert, dtype=torch.bool).scatter_(1, order, place < capacity) & is_text
    kept = kept.view(batch, length, choices).transpose(0, 1).contiguous()  # [S, b, k]
    mine = by_rank(kept, mesh.size("cp"))[mesh.rank("cp")]
    if context.splits_sequence:
        mine = mine.chunk(mesh.size("tp"))[mesh.rank("tp")]
    return mine.reshape(ids.shape)
