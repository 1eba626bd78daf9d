"""Sinkhorn routing: choices of experts from logits that are normalized so that all experts are wanted equally.

Rows and columns of exp(logits) are scaled in turn until those of tokens and of experts have equal sums (S-BASE,
arXiv:2202.01169), with Megatron-LM's tolerance. Scales depend on all tokens that are routed together: here those of a
microbatch, whatever ranks hold parts of its sequences. Megatron-LM takes those of a rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.context_parallel.slicing import in_order
from megatron.core.parallel.collectives import all_gather
from megatron.core.parallel.context import ParallelContext

_TOLERANCE = 1e-4  # of the mean change of an expert's scale
_TINY = 1e-8
_MOST_ROUNDS = 10_000  # scales that still change then belong to logits of a broken run


@torch.no_grad()
def sinkhorn_scores(logits: Tensor, context: ParallelContext, *, batch: int, text: Tensor | None) -> Tensor:
    """Scores [s·b, E] of this rank's tokens for the choice of experts, from their ``logits``, position by position.

    ``batch``: sequences. ``text`` [s·b]: which rows are no padding. A collective of the ranks that divide the
    sequences, which gathers logits, and a loop whose rounds wait for the device.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    wanted = (logits - logits.amax(-1, keepdim=True)).exp()  # a factor of a row changes no score's rank
    if text is not None:
        wanted = wanted.masked_fill(~text.unsqueeze(-1), 0.0)
    return wanted * expert_scales(_of_all_ranks(wanted, context, batch=batch))


def expert_scales(wanted: Tensor) -> Tensor:
    """What each expert's column of ``wanted`` [T, E] is multiplied by, [E]. Rows of zeros have no effect."""
    tokens = wanted.any(-1).sum().clamp(min=1)
    scales = wanted.new_ones(wanted.shape[1])
    for _ in range(_MOST_ROUNDS):
        of_tokens = 1 / (tokens * ((wanted * scales).sum(1) + _TINY))
        before, scales = scales, 1 / (len(scales) * ((of_tokens.unsqueeze(1) * wanted).sum(0) + _TINY))
        if is_small((scales - before).abs().mean()):
            break
    return scales


def is_small(change: Tensor) -> bool:
    """Whether rounds end with this ``change``: where the host waits for the device."""
    return not change.item() > _TOLERANCE


def _of_all_ranks(x: Tensor, context: ParallelContext, *, batch: int) -> Tensor:
    """Rows ``[s·b, …]`` of the ranks that divide the sequences, in the order of positions, ``[S·b, …]``."""
    x = torch.unflatten(x, 0, (-1, batch))
    if context.splits_sequence:
        x = all_gather(x.contiguous(), context.mesh, "tp")
    return in_order(all_gather(x.unsqueeze(0).contiguous(), context.mesh, "cp")).flatten(0, 1)
