"""Experts as the feed-forward network of a layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from typing_extensions import override

from megatron.config.moe import MoEConfig
from megatron.core.moe.dispatch import DispatchPlan, combine, dispatch, plan_dispatch
from megatron.core.moe.experts import Experts
from megatron.core.moe.gather import gather_tokens, plan_dispatch_of_all, scatter_tokens
from megatron.core.moe.report import CHOICES, log_line_and_curves, metric_name
from megatron.core.moe.router import Router
from megatron.core.moe.routing import Routing
from megatron.core.parallel.costs import Costs, Workload, costs_of, total_of
from megatron.core.parallel.recompute import recomputed
from megatron.core.tensor_parallel.layers import ReplicatedLinear
from megatron.core.tensor_parallel.regions import all_rows, own_rows
from megatron.core.transformer.initialization import input_init
from megatron.core.transformer.inputs import LayerInputs
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.place import BranchPlace
from megatron.core.transformer.stack import FEED_FORWARD, Branch, Layer

Layers = tuple[Layer, ...]


class SharedExperts(MLP):
    """A dense MLP for every token; with a gate (Qwen2-MoE) multiplied by a learned number between 0 and 1."""

    def __init__(self, moe: MoEConfig, place: BranchPlace) -> None:
        model, context = place.stack.model, place.context
        assert moe.moe_shared_expert_intermediate_size is not None
        super().__init__(place, width=moe.moe_shared_expert_intermediate_size)
        self.gate = (
            ReplicatedLinear(model.hidden_size, 1, context.in_layer(None), init=input_init(model), bias=False)
            if moe.moe_shared_expert_gate
            else None
        )

    @override
    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """``[s, b, h] -> [s, b, h]``."""
        out = super().forward(x, inputs)
        return out if self.gate is None else out * torch.sigmoid(self.gate(x))

    @override
    def costs(self, workload: Workload) -> Costs:
        """Costs of the network; with a gate, of its output, too."""
        found = super().costs(workload)
        if self.gate is None:
            return found
        out = workload.rows * self.gate.weight.shape[1] * workload.itemsize
        gate = costs_of(self.gate, workload)
        gate = gate if self._context.keeps_bytes else dataclasses.replace(gate, kept=0)  # the first matmul's input
        return found + gate + Costs(kept=out)


class MoELayer(nn.Module):
    """A mixture-of-experts layer: router, routed experts, and shared experts for every token. ``stack``: see
    ``RouterLosses``.
    """

    text_state = None

    def __init__(self, moe: MoEConfig, place: BranchPlace, *, stack: str = "") -> None:
        super().__init__()
        model, context = place.stack.model, place.context
        assert moe.num_experts is not None
        self._num_experts, self._choices, self._context = moe.num_experts, moe.moe_router_topk, context
        self.router = Router(model, moe, context, number=place.number, stack=stack)
        self.experts = Experts(moe, place)
        self._gathers = moe.moe_token_dispatcher_type == "allgather" and context.mesh.size("ep", "etp") > 1
        has_shared = moe.moe_shared_expert_intermediate_size is not None
        self.shared_experts = SharedExperts(moe, place) if has_shared else None
        self._recomputes_shared = "shared_experts" in place.recompute

    @override
    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """``[s, b, h] -> [s, b, h]``."""
        context, tokens = self._context, x.flatten(0, 1)
        routing = self.router(x, inputs)
        with torch.no_grad():
            ids = own_rows(routing.ids, context)
            kept = None if routing.kept is None else own_rows(routing.kept, context)
        mine = Routing(ids, own_rows(routing.weights, context), kept)
        plan, arriving = self._send(own_rows(tokens, context), mine, inputs)
        of_all: Tensor | None = None
        if self.shared_experts is not None:  # while rows are on their way
            recomputes = self._recomputes_shared and self.training
            of_all = recomputed(self.shared_experts, x, inputs) if recomputes else self.shared_experts(x, inputs)
        share = ids.numel() * context.mesh.size("etp")
        out = combine(self.experts(*arriving(), plan.groups, share=share), plan)
        if self._gathers:
            out = scatter_tokens(out, context.mesh)
        out = all_rows(out, context, rows=len(tokens)).view_as(x)
        return out if of_all is None else out + of_all

    def _send(
        self, x: Tensor, routing: Routing, inputs: LayerInputs
    ) -> tuple[DispatchPlan, Callable[[], tuple[Tensor, Tensor]]]:
        """Begin to send tokens ``x`` [t, h] that no other rank has to their experts; what ``dispatch`` returns. A
        recomputed pass takes the same way.
        """
        mesh, weights = self._context.mesh, routing.weights
        if self._gathers:
            x, weights = gather_tokens(x, weights, mesh)
        if self not in inputs.kept:
            planned = plan_dispatch_of_all if self._gathers else plan_dispatch
            inputs.kept[self] = planned(routing, num_experts=self._num_experts, mesh=mesh)
        plan: DispatchPlan = inputs.kept[self]
        return plan, dispatch(x, weights, plan)

    @property
    def _shared_keeps_input(self) -> bool:
        """Whether shared experts keep their input in the model's type."""
        if self.shared_experts is None:
            return False
        return self._recomputes_shared or self.shared_experts.gate is not None or not self._context.keeps_bytes

    def costs(self, workload: Workload) -> Costs:
        """Costs of its parts, of the rows that it sends and their sums. The router keeps its input, which may be that
        of shared experts, unless it casts it to another type.
        """
        parts, shared = total_of((self.router, self.experts), workload), costs_of(self.shared_experts, workload)
        given = workload.rows * self.router.weight.shape[1] * workload.itemsize
        if not self.router.casts and not self._shared_keeps_input:
            parts += Costs(kept=given)
        if self._recomputes_shared and self.shared_experts is not None:
            shared = shared.recomputed(given, keeps_input=not self._context.keeps_bytes)
        parts += shared
        mesh = self._context.mesh
        ids = workload.rows * self._choices * 16  # where each row goes and comes from
        tokens, row = workload.tokens // mesh.size("tp"), self.router.weight.shape[1] * workload.itemsize
        if self._gathers:
            away = tokens * (mesh.size("ep", "etp") - 1)
            weights = self._choices * self.router.weight_bytes
        else:
            ranks, weights = mesh.size("ep"), self.router.weight_bytes
            away = tokens * self._choices * (ranks * mesh.size("etp") - 1) // ranks
        return parts + Costs(kept=ids, replayed=ids, exchanged=away * (2 * row + weights))


def layer_metrics(moe: MoEConfig, marked: Sequence[bool]) -> dict[str, int]:
    """What the routers of layers report, and how many numbers each has: choices of each expert, and dropped ones; sum
    and count of each loss, where those of layers are asked for. ``marked``: whether each layer has experts.
    """
    numbers = [number for number, is_marked in enumerate(marked) if is_marked]
    widths = {CHOICES: (moe.num_experts or 0) + 1}
    if moe.moe_per_layer_logging:
        widths |= dict.fromkeys(moe.loss_names, 2)
    return {metric_name(what, number): width for what, width in widths.items() for number in numbers}


def describe_metrics(
    moe: MoEConfig, metrics: Mapping[str, Sequence[float]], *, ranks: int
) -> tuple[str, dict[str, float]]:
    """A log line about the sums of ``layer_metrics`` over some steps, and curves. ``ranks``: that divide experts."""
    return log_line_and_curves(metrics, ranks=ranks, per_layer=moe.moe_per_layer_logging)


def expert_layers(moe: MoEConfig, stacks: Sequence[int], *, mtp_layers: int = 0) -> tuple[bool, ...]:
    """Whether each layer has experts, one stack after the other, and then ``mtp_layers`` of multi-token prediction,
    which are like the last layer.
    """
    marked = moe.expert_layers(*stacks)
    return marked + marked[-1:] * mtp_layers


def layers_with(branches: Sequence[Branch], moe: MoEConfig, marked: Sequence[bool], *, stack: str = "") -> Layers:
    """Layers of ``branches`` and a feed-forward branch, which has experts where the layer is ``marked``, or is dense.

    ``stack``: see ``RouterLosses``.
    """
    experts = expert_branch(moe, stack=stack)
    return tuple((*branches, experts if is_marked else FEED_FORWARD) for is_marked in marked)


def expert_branch(moe: MoEConfig, *, stack: str = "") -> Branch:
    """The feed-forward branch of a layer with experts."""
    return dataclasses.replace(FEED_FORWARD, build=partial(MoELayer, moe, stack=stack), recompute_name="moe")
