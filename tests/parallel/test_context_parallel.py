"""Attention over slices of the sequence against attention of one rank, for every way to exchange keys or heads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron.core.context_parallel import key_exchange, merged_attention
from megatron.core.context_parallel.attention import attention
from megatron.core.context_parallel.slicing import take
from megatron.core.ops.attention import AttentionOptions, chunked
from megatron.core.ops.attention import attention as attention_of_one_rank
from megatron.core.ops.attention.partial import partial_attention, partial_attention_gradients
from megatron.core.parallel import exchange
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.exchange import RankGroup, all_to_all, circulate, shift
from tests.harness import run_ranks
from tests.tiers import tiers

LENGTH, BATCH, HEADS, WIDTH = 24, 2, 12, 4
CAUSAL = AttentionOptions(causal=True, scale=WIDTH**-0.5)

WAYS: dict[str, dict[str, Any]] = {
    "p2p": {"cp_comm_types": ("p2p",)},
    "all_gather": {"cp_comm_types": ("all_gather",)},
    "a2a": {"cp_comm_types": ("a2a",)},
    "a2a+p2p": {"cp_comm_types": ("a2a+p2p",), "cp_sizes": (2, 2)},
    "a2a+p2p, rings of one": {"cp_comm_types": ("a2a+p2p",), "cp_sizes": (4, 1)},
    "a2a+p2p, heads of one": {"cp_comm_types": ("a2a+p2p",), "cp_sizes": (1, 4)},
}

CALLS: dict[str, dict[str, Any]] = {
    "causal": {},
    "one group": {"groups": 1},
    "bidirectional, two groups": {"groups": 2, "causal": False},
    "cross": {"keys": 40, "causal": False, "groups": 4},
    "documents": {"documents": True, "groups": 4},
    "documents, bidirectional": {"documents": True, "causal": False},
    "padding": {"padding": True, "causal": False, "groups": 4},
    "documents by blocks": {"documents": True, "backend": "chunked"},
    "padding, causal": {"padding": True},
}


def inputs(*, groups: int, keys: int) -> tuple[list[Tensor], Tensor]:
    """Query, key and value over the whole sequence, and the gradient of the result."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((LENGTH, HEADS), (keys, groups), (keys, groups))
    qkv = [torch.randn(s, BATCH, n, WIDTH, generator=generator, dtype=torch.float64) for s, n in shapes]
    return qkv, torch.randn(LENGTH, BATCH, HEADS * WIDTH, generator=generator, dtype=torch.float64)


def options(
    *, causal: bool = True, keys: int = LENGTH, documents: bool = False, padding: bool = False, backend: str = "auto"
) -> tuple[AttentionOptions, str]:
    """Of a call over the whole sequence, and its backend."""
    document_ids = (torch.rand(BATCH, LENGTH, generator=torch.Generator().manual_seed(2)) < 0.2).cumsum(1)
    real = torch.ones(BATCH, keys, dtype=torch.bool)
    real[0, 17:], real[1, :9] = False, False
    asked = AttentionOptions(
        causal=causal,
        scale=WIDTH**-0.5,
        document_ids=document_ids if documents else None,
        attention_mask=real if padding else None,
    )
    return asked, backend


@mock.patch.object(chunked, "_BLOCK", 5)
def on_slices(context: ParallelContext, way: dict[str, Any], call: dict[str, Any]) -> list[float]:
    """How far a rank's result and gradients are from its slices of those of one rank."""
    call = dict(call)
    groups, keys = call.pop("groups", HEADS), call.get("keys", LENGTH)
    whole, upstream = inputs(groups=groups, keys=keys)
    asked, backend = options(**call)
    context = dataclasses.replace(context, **way)

    def held(x: Tensor) -> Tensor:
        return take(x, context.mesh.rank("cp"), context.mesh.size("cp"), dim=0)

    slices = [held(x).requires_grad_() for x in whole]
    q, k, v = slices
    out = attention(q, k, v, asked, context=context, comm_type=context.cp_comm_type(0), backend=backend)
    found = [out, *torch.autograd.grad(out, slices, held(upstream))]

    leaves = [x.requires_grad_() for x in whole]
    q, k, v = leaves
    reference = attention_of_one_rank(q, k, v, asked, backend="eager")
    expected = [reference, *torch.autograd.grad(reference, leaves, upstream)]
    assert out.shape == held(reference).shape
    return [(actual - held(wanted)).abs().max().item() for actual, wanted in zip(found, expected)]


@pytest.mark.parametrize("way", tiers(WAYS, first=("p2p", "a2a+p2p")))
def test_attention_over_slices_is_attention(way: str) -> None:
    """Every rank's result and gradients are its slices of those of one rank, whatever the mask and the groups."""
    for name, call in CALLS.items():
        for differences in run_ranks(on_slices, WAYS[way], call, cp=4, dtype=torch.float64):
            assert max(differences) < 1e-12, f"{name}: out, q, k, v differ by {differences}"


def errors_in_bf16(context: ParallelContext, way: dict[str, Any]) -> list[float]:
    """Errors of a rank's result and gradients in bf16, relative to the largest number of each."""
    whole, upstream = inputs(groups=4, keys=LENGTH)
    rounded = [x.bfloat16() for x in whole]
    context = dataclasses.replace(context, **way)
    rank, ranks = context.mesh.rank("cp"), context.mesh.size("cp")
    slices = [take(x, rank, ranks, dim=0).requires_grad_() for x in rounded]
    q, k, v = slices
    out = attention(q, k, v, CAUSAL, context=context, comm_type=context.cp_comm_type(0))
    found = [out, *torch.autograd.grad(out, slices, take(upstream, rank, ranks, dim=0).bfloat16())]
    exact = [x.double().requires_grad_() for x in rounded]
    q, k, v = exact
    reference = attention_of_one_rank(q, k, v, CAUSAL, backend="eager")
    expected = [reference, *torch.autograd.grad(reference, exact, upstream)]
    return [
        ((actual.double() - take(wish, rank, ranks, dim=0)).abs().max() / wish.abs().max()).item()
        for actual, wish in zip(found, expected)
    ]


@pytest.mark.parametrize("way", ["p2p", "all_gather", "a2a"])
def test_slices_in_bf16_lose_rounding_only(way: str) -> None:
    """Sums over ranks travel in 16 bits; a merge in 16 bits, or one sum too many, would show in the loss."""
    for errors in run_ranks(errors_in_bf16, WAYS[way], cp=4, dtype=torch.bfloat16):
        assert max(errors) < 4 * torch.finfo(torch.bfloat16).eps, f"out, q, k, v are off by {errors}"


def order_of_events(context: ParallelContext) -> list[str]:
    """What one rank does in a forward and a backward pass over a ring: "send", "wait" and "compute"."""
    seen: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            seen.append(name)
            return function(*arguments, **options)

        return call

    def start(*arguments: Any, **options: Any) -> Any:
        seen.append("send")
        return mock.Mock(wait=noted("wait", shift(*arguments, **options).wait))

    (q, k, v), upstream = inputs(groups=HEADS, keys=LENGTH)
    q, k, v = (take(x, context.mesh.rank("cp"), 3, dim=0).requires_grad_() for x in (q, k, v))
    with (
        mock.patch.object(exchange, "shift", start),
        mock.patch.object(key_exchange, "shift", start),
        mock.patch.object(merged_attention, "partial_attention", noted("compute", partial_attention)),
        mock.patch.object(
            merged_attention, "partial_attention_gradients", noted("compute", partial_attention_gradients)
        ),
    ):
        out = attention(q, k, v, CAUSAL, context=context, comm_type="p2p")
        seen.append("|")
        out.backward(take(upstream, context.mesh.rank("cp"), 3, dim=0))  # type: ignore[no-untyped-call]
    return seen


def test_keys_travel_while_attention_is_computed() -> None:
    """A ring that computes and then sends takes as long as both together; no number would show it."""
    for seen in run_ranks(order_of_events, cp=3, dtype=torch.float64):
        forward, backward = " ".join(seen).split(" | ")
        assert forward == "send compute wait send compute wait compute"
        assert backward == "send compute wait send compute send wait compute wait send wait"


def places_of_keys(context: ParallelContext) -> tuple[list[float], int]:
    """What a rank sees on a ring, and in how many places of memory it lay."""
    peers = RankGroup.of(context.mesh, "cp")
    seen = [(x[0].item(), x.data_ptr()) for _, x in circulate(torch.full((3,), float(peers.rank)), peers)]
    return [value for value, _ in seen], len({place for _, place in seen})


def test_a_ring_holds_two_ranks_keys() -> None:
    """Memory must not grow with the number of ranks; that is what a ring is for."""
    for rank, (seen, places) in enumerate(run_ranks(places_of_keys, cp=5)):
        assert seen == [(rank - step) % 5 for step in range(5)]
        assert places == 2


def exchanges(context: ParallelContext) -> tuple[list[tuple[int, float]], list[float], list[float], float]:
    """What a rank of four sees on a ring, from its pairs and its counterparts, and two rings at once."""
    peers = RankGroup.of(context.mesh, "cp")
    mine = torch.full((3,), float(peers.rank))
    seen = [(owner, x[0].item()) for owner, x in circulate(mine.clone(), peers)]
    numbers = torch.arange(2.0) + 10 * peers.rank
    pairs = all_to_all(numbers, peers.neighbours(2)).tolist()
    across = all_to_all(numbers, peers.counterparts(2)).tolist()
    one, other = shift(mine, peers), shift(mine + 100, peers, tag=1)
    return seen, pairs, across, other.wait()[0].item() - one.wait()[0].item()


def test_exchanges_go_where_they_should() -> None:
    """A wrong neighbour gives every rank a sound tensor that belongs elsewhere."""
    results = run_ranks(exchanges, cp=4)
    for rank, (seen, _, _, difference) in enumerate(results):
        assert seen == [(owner % 4, float(owner % 4)) for owner in range(rank, rank - 4, -1)]
        assert difference == 100.0
    assert [pairs for _, pairs, _, _ in results] == [[0, 10], [1, 11], [20, 30], [21, 31]]
    assert [across for _, _, across, _ in results] == [[0, 20], [10, 30], [1, 21], [11, 31]]
