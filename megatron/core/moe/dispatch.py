"""Sends tokens to the ranks of their experts, and combines the results: each function is the other's gradient.

A row goes to every rank that holds a part of its expert: to one over ``ep``, and there to all over ``etp``, whose
results are parts of a sum. That is one all-to-all with as many bytes as an all-to-all over ``ep`` followed by an
all-gather over ``etp``. A rank without rows takes part in every collective, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from megatron.core.moe.routing import Routing, times_chosen
from megatron.core.ops.grouped_matmul import Groups
from megatron.core.parallel.collectives import Handle, all_gather
from megatron.core.parallel.exchange import RankGroup, all_to_all_rows, start_all_to_all_rows
from megatron.core.parallel.mesh import Mesh


@dataclass(frozen=True)
class DispatchPlan:
    """Where the rows of a microbatch go in one layer.

    ``sent`` [n]: the choice, ``token · k + place``, of each row that this rank sends, in the order of the receiving
    ranks and there of the experts. ``rows`` [t, k · copies]: where the rows of each token are in ``sent``.
    ``sends``, ``receives``: how many rows go to and come from each rank of the ``peers``. ``arrived``: the received
    row at each place in the order of this rank's experts; None where all rows are its own. ``groups``: rows of
    each of these experts. ``drops``: whether choices may be missing, whose rows are past the end of ``sent``.
    """

    peers: RankGroup
    sent: Tensor
    rows: Tensor
    choices: int
    sends: list[int]
    receives: list[int]
    arrived: Tensor | None
    groups: Groups
    drops: bool = False


def plan_local_dispatch(routing: Routing, *, num_experts: int, mesh: Mesh) -> DispatchPlan:
    """The plan of tokens whose experts are all here, but for choices that aren't kept."""
    ids, kept = routing.ids, routing.kept
    alone, (tokens, choices) = RankGroup(mesh, (mesh.world_rank,)), ids.shape
    (sent, counts), sizes = _sorted(ids, kept, num_experts), None
    if kept is not None:
        sizes = rows_on_host(counts)
        sent = sent[: sum(sizes)]
    places = _places(sent, tokens * choices, copies=1, drops=kept is not None).view(tokens, choices)
    return DispatchPlan(alone, sent, places, choices, [], [], None, Groups(counts, sizes), drops=kept is not None)


def _sorted(ids: Tensor, kept: Tensor | None, num_experts: int) -> tuple[Tensor, Tensor]:
    """The choices in the order of their experts, those that aren't ``kept`` last, and how many each expert has."""
    flat = ids.flatten() if kept is None else ids.masked_fill(~kept, num_experts).flatten()
    return flat.argsort(stable=True), times_chosen(flat, num_experts + 1)[:num_experts]


def rows_on_host(counts: Tensor) -> list[int]:
    """Numbers of rows [n] as the host needs them for shapes: where a layer's forward pass waits for the device, once.

    ``counts``: those of the experts' rows that are here, or of all experts' and then of each rank's by expert.
    """
    found: list[int] = counts.tolist()
    return found


def _places(sent: Tensor, choices: int, *, copies: int, drops: bool) -> Tensor:
    """Where in ``sent`` the copies of each choice are, [choices, copies]; past the end for one that isn't there."""
    if not drops and copies == 1:
        return _inverse(sent)
    order = sent.argsort(stable=True).view(-1, copies)
    if not drops:
        return order
    places = torch.full((choices, copies), len(sent), dtype=order.dtype, device=order.device)
    return places.index_copy_(0, sent.index_select(0, order[:, 0]), order)


def plan_dispatch(routing: Routing, *, num_experts: int, mesh: Mesh) -> DispatchPlan:
    """The plan of tokens to the experts that they chose. With several ranks a small collective."""
    peers, ids, kept = RankGroup.of(mesh, "ep", "etp"), routing.ids, routing.kept
    if peers.size == 1:
        return plan_local_dispatch(routing, num_experts=num_experts, mesh=mesh)
    tokens, choices = ids.shape
    sent, counts = _sorted(ids, kept, num_experts)
    copies, held = mesh.size("etp"), num_experts // mesh.size("ep")
    first = held * mesh.rank("ep")
    table = all_gather(counts.unsqueeze(0), mesh, "ep", "etp")  # [ranks, E]
    received = table[:, first : first + held]  # from each rank, by expert
    numbers = rows_on_host(torch.cat((counts, received.flatten())))
    of_held = [numbers[start : start + held] for start in range(0, len(numbers), held)]
    totals, sizes = [*map(sum, of_held)], [*map(sum, zip(*of_held[mesh.size("ep") :]))]
    blocks, receives = totals[: mesh.size("ep")], totals[mesh.size("ep") :]
    sent = sent[: sum(blocks)]
    if copies > 1:
        sent = torch.cat([part for part in torch.split(sent, blocks) for _ in range(copies)])
    experts = torch.arange(held, device=ids.device).repeat(peers.size)
    arrived = experts.repeat_interleave(received.flatten(), output_size=sum(receives)).argsort(stable=True)
    drops = kept is not None
    rows = _places(sent, tokens * choices, copies=copies, drops=drops).view(tokens, choices * copies)
    sends = [size for size in blocks for _ in range(copies)]
    groups = Groups(received.sum(0), sizes)
    return DispatchPlan(peers, sent, rows, choices, sends, receives, arrived, groups, drops=drops)


def dispatch(x: Tensor, weights: Tensor, plan: DispatchPlan) -> Callable[[], tuple[Tensor, Tensor]]:
    """Begin to send rows of tokens ``x`` [t, h] and their ``weights`` [t, k] to their experts.

    The function that is returned waits for the rows [n, h] that come to this rank and their weights [n], in the order
    of its experts. What is computed until then is computed while they travel, and its backward pass while their
    gradients travel back.
    """
    if plan.peers.size == 1:
        here: tuple[Tensor, Tensor] = _Stay.apply(x, weights, plan)  # type: ignore[no-untyped-call]
        return lambda: here
    in_flight = _InFlight(plan, weights.dtype)
    sent: Tensor = _Send.apply(x, weights, in_flight)  # type: ignore[no-untyped-call]

    def wait() -> tuple[Tensor, Tensor]:
        rows, of_rows = _Receive.apply(sent, in_flight)  # type: ignore[no-untyped-call]
        return rows, of_rows

    return wait


@dataclass
class _InFlight:
    """Rows of one dispatch between sending and arrival. ``coming``: packed rows, or in the backward pass their
    gradients, on their way to this rank.
    """

    plan: DispatchPlan
    weights_dtype: torch.dtype
    coming: Handle[Tensor] | None = None

    def arrived(self) -> Tensor:
        assert self.coming is not None, "what was not sent can't arrive"
        found, self.coming = self.coming.wait(), None
        return found


def combine(rows: Tensor, plan: DispatchPlan) -> Tensor:
    """The sums [t, h] of what the experts of each token returned, ``rows`` [n, h] in the order of ``dispatch``."""
    return _Combine.apply(rows, plan)  # type: ignore[no-untyped-call, no-any-return]


class _Stay(torch.autograd.Function):
    """Rows whose experts are all here."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, weights: Tensor, plan: DispatchPlan) -> tuple[Tensor, Tensor]:
        ctx.plan, ctx.shape = plan, weights.shape
        return x.index_select(0, plan.sent // plan.choices), weights.flatten().index_select(0, plan.sent)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor, grad_weights: Tensor) -> tuple[Tensor, Tensor, None]:
        return _summed(grad, ctx.plan), _of_choices(grad_weights, ctx.plan, ctx.shape), None


class _Send(torch.autograd.Function):
    """The result stands for the rows that will arrive: it has their shape, and zeros."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, weights: Tensor, in_flight: _InFlight) -> Tensor:
        plan = in_flight.plan
        ctx.in_flight, ctx.shape, ctx.width = in_flight, weights.shape, x.shape[1]
        rows = x.index_select(0, plan.sent // plan.choices)
        both = packed(rows, weights.flatten().index_select(0, plan.sent).unsqueeze(1))
        in_flight.coming = start_all_to_all_rows(both, plan.peers, plan.sends, plan.receives)
        return both.new_zeros(1, 1).expand(sum(plan.receives), both.shape[1])

    @staticmethod
    @override
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, Tensor, None]:
        in_flight: _InFlight = ctx.in_flight
        grad, grad_weights = unpacked(in_flight.arrived(), ctx.width, in_flight.weights_dtype)
        return _summed(grad, in_flight.plan), _of_choices(grad_weights.view(-1), in_flight.plan, ctx.shape), None


class _Receive(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, sent: Tensor, in_flight: _InFlight) -> tuple[Tensor, Tensor]:
        ctx.in_flight, ctx.shape = in_flight, sent.shape
        both, dtype = in_flight.arrived(), in_flight.weights_dtype
        assert in_flight.plan.arrived is not None, "rows of several ranks arrive in another order than that of experts"
        both = both.index_select(0, in_flight.plan.arrived)
        rows, of_rows = unpacked(both, both.shape[1] - dtype.itemsize // both.dtype.itemsize, dtype)
        return rows, of_rows.view(-1)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor, grad_weights: Tensor) -> tuple[Tensor, None]:
        in_flight: _InFlight = ctx.in_flight
        plan, both = in_flight.plan, packed(grad, grad_weights.unsqueeze(1))
        assert plan.arrived is not None
        both = both.index_select(0, _inverse(plan.arrived))
        in_flight.coming = start_all_to_all_rows(both, plan.peers, plan.receives, plan.sends)
        return both.new_zeros(1, 1).expand(ctx.shape), None


class _Combine(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, rows: Tensor, plan: DispatchPlan) -> Tensor:
        ctx.plan = plan
        if plan.arrived is not None:
            rows = rows.index_select(0, _inverse(plan.arrived))
            rows = all_to_all_rows(rows, plan.peers, plan.receives, plan.sends)
        return _summed(rows, plan)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        plan: DispatchPlan = ctx.plan
        rows = grad.index_select(0, plan.sent // plan.choices)
        if plan.arrived is not None:
            rows = all_to_all_rows(rows, plan.peers, plan.sends, plan.receives).index_select(0, plan.arrived)
        return rows, None


def _summed(rows: Tensor, plan: DispatchPlan) -> Tensor:
    """The sum of each token's rows, always in the same order, in fp32 or the wider type of ``rows``."""
    return functional.embedding_bag(plan.rows, _padded(rows, plan), mode="sum")


def _of_choices(of_rows: Tensor, plan: DispatchPlan, shape: torch.Size) -> Tensor:
    """Sums [t, k] of what belongs to the rows of each choice."""
    return _padded(of_rows, plan).index_select(0, plan.rows.flatten()).view(*shape, -1).sum(-1)


def _padded(rows: Tensor, plan: DispatchPlan) -> Tensor:
    """Rows, and a zero for choices that were dropped."""
    return torch.cat((rows, rows.new_zeros(1, *rows.shape[1:]))) if plan.drops else rows


def packed(rows: Tensor, weights: Tensor) -> Tensor:
    """Rows [n, h] with the bytes of their weights [n, k] behind them, so that one message carries both."""
    return torch.cat((rows, weights.contiguous().view(rows.dtype)), dim=1)


def unpacked(both: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What was packed: rows of ``width`` numbers, and weights of ``dtype``."""
    return both[:, :width].contiguous(), both[:, width:].contiguous().view(dtype)


def _inverse(permutation: Tensor) -> Tensor:
    places = torch.arange(len(permutation), device=permutation.device)
    return torch.empty_like(permutation).scatter_(0, permutation, places)
