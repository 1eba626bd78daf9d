"""Losses of answers' log-probabilities, which need not be linear in them, while logits exist by chunks only.

Log-probabilities are computed first, without gradient; the slope of the loss at each then weights the cross entropy of
its token, whose gradient is that of the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.transformer.output_layer import VocabularyOutput


@dataclass(frozen=True)
class AnswerTokens:
    """Tokens of answers among this context-parallel rank's part of a microbatch: ``here`` [b, S] which they are,
    ``output`` [n, 1, h] with their ``labels`` [1, n].
    """

    here: Tensor
    output: VocabularyOutput
    labels: Tensor

    @classmethod
    def of(cls, output: VocabularyOutput, labels: Tensor, mask: Tensor) -> AnswerTokens:
        """The tokens of ``labels`` [b, S] where ``mask`` is true; any one where it is nowhere, so that every gradient
        is made.
        """
        if not mask.any():
            mask = mask.clone()
            mask[0, 0] = True
        return cls(mask, output.where(mask), labels[mask].unsqueeze(0))

    def with_gradient(self, loss: Tensor, slopes: Tensor, backward_scale: float) -> Tensor:
        """``loss`` with the gradient that its derivatives [n] by log-probabilities of the tokens give, where there are
        gradients.
        """
        if not torch.is_grad_enabled():
            return loss
        graph = self.output.cross_entropy(self.labels, -slopes.unsqueeze(0), backward_scale=backward_scale)
        return loss + (graph - graph.detach())


def loss_and_slopes(loss: Callable[[Tensor], Tensor], log_probs: Tensor) -> tuple[Tensor, Tensor]:
    """``loss`` of ``log_probs``, and its derivatives by them; both without gradient."""
    with torch.enable_grad():
        leaf = log_probs.detach().clone().requires_grad_()
        found = loss(leaf)
        (slopes,) = torch.autograd.grad(found, leaf)
    return found.detach(), slopes
