"""Losses that balance the load of experts, as Megatron-LM defines them; each is reported as a sum over tokens.

With c the number of choices of an expert and P the sum of its shares, over T tokens that choose k of E experts each,
the loss is E / (k T²) · Σ c P: 1 when all experts are chosen equally often (arXiv:2101.03961). Choices have no
gradient. A rank adds its own tokens' P, so the ranks' values add up. Padding is none of the T tokens. A sequence is a
row of the batch, whatever documents are in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.config.expert_settings import LOSS_NAMES, Z_LOSS, LoadBalancing
from megatron.config.moe import MoEConfig
from megatron.core.moe.report import metric_name
from megatron.core.moe.routing import Routing, shares_of
from megatron.core.parallel.collectives import all_reduce
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.grid import Axis
from megatron.core.parallel.side_losses import SideLosses, sum_and_count


@dataclass(frozen=True)
class RouterLosses:
    """The losses of the router of layer ``number``. ``stack``: begins their names, where a model has several stacks."""

    moe: MoEConfig
    context: ParallelContext
    number: int
    stack: str = ""

    def attach(
        self,
        routing: Routing,
        logits: Tensor,
        scores: Tensor,
        *,
        batch: int,
        losses: SideLosses,
        text: Tensor | None = None,
    ) -> Tensor:
        """The weights of ``routing``, through which the gradients of all losses start.

        ``logits``, ``scores`` [s·b, E]: of this rank's tokens, position by position. ``batch``: sequences. ``text``
        [s·b]: which of them count, as they aren't padding; None: all.
        """
        weights, tokens = routing.weights, len(logits) if text is None else text.sum()
        if self.moe.balancing_losses:
            shares = torch.unflatten(_of_text(shares_of(scores, self.moe), text), 0, (-1, batch)).sum(0)
            choices = self._choices(routing, scores.detach(), batch=batch, text=text)
            for kind, coefficient in self.moe.balancing_losses.items():
                total = self._balancing(kind, shares, choices)
                weights = self._add(weights, LOSS_NAMES[kind], total, tokens, coefficient, losses)
        if self.moe.moe_z_loss_coeff:
            total = _of_text(logits.to(scores.dtype).logsumexp(-1).square(), text).sum()
            weights = self._add(weights, Z_LOSS, total, tokens, self.moe.moe_z_loss_coeff, losses)
        return weights

    def _add(
        self, weights: Tensor, name: str, total: Tensor, tokens: int | Tensor, coefficient: float, losses: SideLosses
    ) -> Tensor:
        """Add a loss to that of this name of all layers; where they are asked for, report it as this layer's, too."""
        if self.moe.moe_per_layer_logging:
            pair = sum_and_count(total, tokens).double()
            losses.add_metric(metric_name(name, self.number), pair, context=self.context)
        return losses.add(weights, self.stack + name, total, tokens, context=self.context, coefficient=coefficient)

    def _choices(self, routing: Routing, scores: Tensor, *, batch: int, text: Tensor | None) -> Tensor:
        """How often this rank's tokens of each sequence prefer each expert [b, E], whatever biases and groups say."""
        is_plain = not self.moe.moe_router_enable_expert_bias and self.moe.moe_router_num_groups is None
        ids = routing.ids if is_plain else scores.topk(self.moe.moe_router_topk, dim=-1).indices
        of_sequence, ones = (
            torch.unflatten(each, 0, (-1, batch)).transpose(0, 1).flatten(1)
            for each in (ids, _of_text(torch.ones_like(ids), text))
        )
        counts = torch.zeros(batch, scores.shape[-1], dtype=torch.int64, device=ids.device)
        return counts.scatter_add_(1, of_sequence, ones)

    def _balancing(self, kind: LoadBalancing, shares: Tensor, choices: Tensor) -> Tensor:
        """A balancing loss times the tokens that it is a mean over, from ``shares`` and ``choices`` [b, E] of this
        rank's tokens.
        """
        axes: tuple[Axis, ...] = ("cp", "tp") if self.context.splits_sequence else ("cp",)
        if kind == "global_aux_loss":
            axes = ("dp", *axes)
        if kind != "seq_aux_loss":
            shares, choices = shares.sum(0), choices.sum(0)
        choices = all_reduce(choices.clone(), self.context.mesh, *axes).to(shares.dtype)
        return shares.shape[-1] * (shares * choices / choices.sum(-1, keepdim=True).clamp(min=1)).sum()


def _of_text(x: Tensor, text: Tensor | None) -> Tensor:
    """Numbers ``x`` [t, …] of tokens, with zeros for padding."""
    return x if text is None else x.masked_fill(~text.view(-1, *[1] * (x.dim() - 1)), 0)


def router_counts(text: Tensor | None, tokens: Tensor, *, stack: str = "") -> dict[str, Tensor]:
    """The number of tokens that each loss of a stack's routers is a mean over.

    They are those in the mask ``text``, or all of ``tokens``, a tensor with an element for each. ``stack``: see
    ``RouterLosses``.
    """
    count = torch.full((), tokens.numel(), device=tokens.device) if text is None else text.sum()
    return {stack + name: count for name in (*LOSS_NAMES.values(), Z_LOSS)}
