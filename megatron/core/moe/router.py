"""The router of a layer: which experts its tokens choose."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from typing_extensions import override

from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig
from megatron.core.moe.balancing import RouterLosses
from megatron.core.moe.capacity import within_capacity
from megatron.core.moe.report import CHOICES, metric_name
from megatron.core.moe.routing import Routing, choose_experts, scores_of, times_chosen, weights_of
from megatron.core.moe.sinkhorn import sinkhorn_scores
from megatron.core.ops.matmul import linear
from megatron.core.parallel.costs import Costs, Workload
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.sharding import Sharding
from megatron.core.tensor_parallel.initialize import Constant
from megatron.core.tensor_parallel.layers import make_parameter, partial_under_sequence_parallel
from megatron.core.transformer.initialization import input_init
from megatron.core.transformer.inputs import LayerInputs

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class Router(nn.Module):
    """A linear layer from hidden states to logits of experts, outside the tensor-parallel regions.

    It has a bias where the experts have (gpt-oss). ``number``: of its layer. ``stack``: see ``RouterLosses``.
    ``expert_bias``: added to scores for the choice (arXiv:2408.15664); it has no gradient, and moves after each step by
    the counts of the whole batch.
    """

    def __init__(
        self, model: ModelConfig, moe: MoEConfig, context: ModelContext, *, number: int, stack: str = ""
    ) -> None:
        super().__init__()
        assert moe.num_experts is not None
        self.metric_name, self._context = metric_name(CHOICES, number), context
        self._moe, self._losses = moe, RouterLosses(moe, context, number, stack)
        self._dtype = context.dtype
        if moe.moe_router_dtype is not None:
            self._dtype = torch.promote_types(context.dtype, _DTYPES[moe.moe_router_dtype])
        partial = partial_under_sequence_parallel(context)
        weight = Sharding((moe.num_experts, model.hidden_size), partial_grad=partial)
        self.weight = make_parameter(weight, input_init(model), context)
        bias = Sharding((moe.num_experts,), partial_grad=partial)
        self.bias = make_parameter(bias, Constant(0.0), context) if model.add_mlp_bias else None
        self.expert_bias = None
        if moe.moe_router_enable_expert_bias:
            wide = dataclasses.replace(context, dtype=torch.promote_types(context.dtype, torch.float32))
            self.expert_bias = make_parameter(Sharding((moe.num_experts,)), Constant(0.0), wide).requires_grad_(False)

    @override
    def forward(self, x: Tensor, inputs: LayerInputs) -> Routing:
        """The choices of the tokens of ``x`` ``[s, b, h]``, position by position, of which those of padding aren't
        kept. A recomputed forward pass chooses what the first one chose.
        """
        bias = None if self.bias is None else self.bias.to(self._dtype)
        logits = linear(
            x.flatten(0, 1).to(self._dtype), self.weight.to(self._dtype), bias, by=self._context.products.multiply
        )
        scores = scores_of(logits, self._moe)
        text, ids = inputs.text_mask, inputs.kept.get(self)
        if ids is None:
            ids = inputs.kept[self] = self._choose(logits, scores, batch=x.shape[1], text=text)
        routing = Routing(ids, weights_of(ids, logits, scores, self._moe))
        if self._context.products.in_generation:  # where a step's tokens are no sequences, and replicas run apart
            return routing
        weights = self._losses.attach(routing, logits, scores, batch=x.shape[1], losses=inputs.side_losses, text=text)
        experts, kept, of_text = len(self.weight), None, ids
        if text is not None:
            kept = text.unsqueeze(1).expand_as(ids)
            of_text = ids.masked_fill(~kept, experts)
        if self.training and self._moe.moe_expert_capacity_factor is not None:
            kept = within_capacity(of_text, weights, self._moe, self._context, batch=x.shape[1])
        counts = times_chosen(of_text.flatten(), experts + 1)
        if kept is not None:
            counts[-1] = counts[:-1].sum() - kept.sum()  # dropped choices
        inputs.side_losses.add_metric(self.metric_name, counts, context=self._context)
        return Routing(ids, weights, kept)

    def _choose(self, logits: Tensor, scores: Tensor, *, batch: int, text: Tensor | None) -> Tensor:
        """The choices [s·b, k] of tokens with ``logits`` and ``scores`` [s·b, E]."""
        moe = self._moe
        if self.training and moe.uses_sinkhorn and not moe.moe_router_force_load_balancing:
            scores = sinkhorn_scores(logits, self._context, batch=batch, text=text)
        return choose_experts(scores, moe, bias=self.expert_bias, text=text)

    @property
    def casts(self) -> bool:
        """Whether it computes in another type than the model's."""
        return self._dtype != self._context.dtype

    @property
    def weight_bytes(self) -> int:
        """Bytes of one routing weight."""
        return torch.promote_types(self._dtype, torch.float32).itemsize

    @torch.no_grad()
    def update_from_counts(self, counts: Tensor) -> None:
        """Move the biases towards balance: up for experts that were chosen less often than the mean of ``counts``, down
        for the others; not those of a frozen router.

        ``counts`` [E + 1]: choices of each expert, dropped ones included, then how many were dropped in all.
        """
        if self.expert_bias is not None and self.weight.requires_grad:
            load = counts[:-1].to(self.expert_bias.dtype)
            self.expert_bias += self._moe.moe_router_bias_update_rate * torch.sign(load.mean() - load)

    def costs(self, workload: Workload) -> Costs:
        """Keeps logits, scores and choices; its input, in its type, where that is another than the model's."""
        tokens, (experts, hidden) = workload.rows, self.weight.shape
        own = self._dtype.itemsize
        cast = tokens * hidden * own if self.casts else 0
        per_token = experts * (own + 4) + self._moe.moe_router_topk * (8 + 4)
        flops = 2.0 * experts * hidden * workload.all_tokens
        return Costs.of_product(self.weight, flops, kept=cast + tokens * per_token)
