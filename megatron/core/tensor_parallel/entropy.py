"""Entropies of distributions over the vocabulary, computed beside the cross entropies, a chunk of logits at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.parallel.collectives import all_reduce
from megatron.core.tensor_parallel.cross_entropy import VocabularyPart, logit_chunks, softmax_, wide_type


@torch.no_grad()
def token_losses_and_entropies(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocabulary: VocabularyPart,
    bias: Tensor | None = None,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Cross entropy of each row and the entropy of its softmax in nats, [N] each, without gradient, in fp32 (fp64 for
    fp64 inputs); arguments as of ``linear_cross_entropy``.
    """
    losses, entropies = (hidden.new_empty(hidden.shape[0], dtype=wide_type(hidden)) for _ in range(2))
    for chunk in logit_chunks(hidden, weight, bias, vocabulary, cap):
        logits = chunk.wide[:, : vocabulary.valid].clone()
        softmax = softmax_(chunk.wide, labels[chunk.rows], vocabulary)
        here = (logits * softmax.local[:, : vocabulary.valid]).sum(dim=1, keepdim=True) * softmax.factor
        losses[chunk.rows] = softmax.losses
        entropies[chunk.rows] = (softmax.log_z - all_reduce(here, vocabulary.mesh, "tp")).squeeze(1)
    return losses, entropies
