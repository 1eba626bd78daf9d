"""Gradient sync over ranks: after ``finish`` gradients are whole where they are owned, whatever ran early."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from megatron.core.distributed import grad_sync
from megatron.core.distributed.buffers import FlatBuffer, build_buffers
from megatron.core.distributed.grad_sync import GradSync
from megatron.core.parallel.collectives import all_gather, reduce_scatter_into_async
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.sharding import Sharding, sharded_parameter
from megatron.core.parallel.weight_gradients import WeightGradients
from megatron.errors import ParallelError
from tests.harness import run_ranks

WIDTH = 24


class Chain(nn.Module):
    """Matrices and biases one after the other; the last matrix gets its gradient by hand, as a fused loss may do it.

    ``experts``: so many matrices more, of which each rank over ``ep`` has some.
    """

    def __init__(self, context: ParallelContext, *, layers: int = 4, experts: int = 0) -> None:
        super().__init__()
        held = Sharding((experts, WIDTH, WIDTH), {0: "ep"}, reduce=("edp",))
        self.experts = parameter(context, held) if experts else None
        self.matrices = nn.ParameterList(parameter(context, Sharding((WIDTH, WIDTH))) for _ in range(layers))
        self.biases = nn.ParameterList(parameter(context, Sharding((WIDTH,))) for _ in range(layers))
        self.head = parameter(context, Sharding((WIDTH, WIDTH)))

    def loss(self, x: Tensor) -> Tensor:
        """A sum over the batch; adds the head's gradient to its buffer."""
        for expert in () if self.experts is None else self.experts:
            x = torch.tanh(x @ expert)
        for matrix, bias in zip(self.matrices, self.biases):
            x = torch.tanh(x @ matrix + bias)
        self.head.main_grad.add_(x.detach().t() @ x.detach())  # type: ignore[attr-defined]
        return (x @ self.head.detach()).float().square().sum()


def parameter(context: ParallelContext, sharding: Sharding) -> nn.Parameter:
    made = sharded_parameter(sharding, context.mesh, dtype=context.dtype, device=context.device)
    generator = torch.Generator().manual_seed(sum(sharding.shape))
    made.data.copy_(torch.randn(sharding.local_shape(context.mesh), generator=generator) * 0.3)
    return made


def samples(context: ParallelContext, microbatch: int) -> Tensor:
    """Other samples on every data-parallel rank."""
    generator = torch.Generator().manual_seed(100 * microbatch + context.mesh.rank("dp", "cp"))
    return torch.randn(5, WIDTH, generator=generator).to(context.dtype)


def owned_gradients(buffers: list[FlatBuffer], context: ParallelContext) -> Tensor:
    """This rank's shards of all buffers."""
    parts = []
    for buffer in buffers:
        parts += [buffer.shard(bucket).of(buffer.grads) for bucket in buffer.buckets]
    return torch.cat(parts).clone()


def gradients_by_every_way(context: ParallelContext) -> tuple[list[Tensor], Tensor]:
    """Owned gradients after sync, for every way; and the sum over ranks of what backward gave."""
    ways = itertools.product((False, True), (False, True))
    found = [gradients_of_two_steps(context, sharded, overlap) for sharded, overlap in ways]
    alone = Chain(context)
    local = build_buffers(alone.named_parameters(), context, grad_dtype=torch.float32, bucket_size=700)
    GradSync(local, context, weight_gradients=WeightGradients(), sharded=False, overlap=False)
    for microbatch in range(2):
        alone.loss(samples(context, microbatch)).backward()  # type: ignore[no-untyped-call]
    for buffer in local:
        buffer.grads.copy_(all_gather(buffer.grads.unsqueeze(0), context.mesh, "dp", "cp").sum(0))
    return found, owned_gradients(local, context)


def gradients_of_two_steps(context: ParallelContext, sharded: bool, overlap: bool) -> Tensor:
    """Owned gradients after sync in the second of two steps."""
    model = Chain(context)
    buffers = build_buffers(model.named_parameters(), context, grad_dtype=torch.float32, bucket_size=700)
    sync = GradSync(buffers, context, weight_gradients=WeightGradients(), sharded=sharded, overlap=overlap)
    for _ in range(2):
        sync.zero()
        model.loss(samples(context, 0)).backward()  # type: ignore[no-untyped-call]
        with sync.last_backward():
            model.loss(samples(context, 1)).backward()  # type: ignore[no-untyped-call]
        sync.finish()
    return owned_gradients(buffers, context)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [{"dp": 2}, {"dp": 3}, {"dp": 2, "cp": 2}])
def test_gradients_are_summed_over_data(ranks: dict[str, Any], dtype: torch.dtype) -> None:
    """A rank's samples would be lost or counted twice; overlap or sharding would change the sum."""
    for found, expected in run_ranks(gradients_by_every_way, dtype=dtype, **ranks):
        torch.testing.assert_close(found[0], expected, rtol=1e-5, atol=1e-5)
        assert all(torch.equal(each, found[0]) for each in found)


def narrow_gradients(context: ParallelContext, experts: int) -> tuple[list[Tensor], Tensor]:
    """Owned bf16 gradients after sync: summed by the library, and in fp32 without and with overlap; and what each rank
    had before, summed in fp32 and rounded once.
    """
    found = []
    for overlap, sums_in_fp32 in ((False, False), (False, True), (True, True)):
        model = Chain(context, experts=experts)
        buffers = build_buffers(model.named_parameters(), context, grad_dtype=torch.bfloat16, bucket_size=700)
        sync = GradSync(
            buffers,
            context,
            weight_gradients=WeightGradients(),
            sharded=True,
            overlap=overlap,
            sums_in_fp32=sums_in_fp32,
        )
        for step in range(2):
            sync.zero()
            with sync.last_backward():
                model.loss(samples(context, step)).backward()  # type: ignore[no-untyped-call]
            sync.finish()
        found.append(owned_gradients(buffers, context))
    alone = Chain(context, experts=experts)
    local = build_buffers(alone.named_parameters(), context, grad_dtype=torch.bfloat16, bucket_size=700)
    GradSync(local, context, weight_gradients=WeightGradients(), sharded=True, overlap=False)
    alone.loss(samples(context, 1)).backward()  # type: ignore[no-untyped-call]
    for buffer in local:
        everyone = all_gather(buffer.grads.unsqueeze(0), context.mesh, *buffer.levels.inner)
        buffer.grads.copy_(everyone.float().sum(0))
    return found, owned_gradients(local, context)


@pytest.mark.parametrize(("experts", "ranks"), [(0, {"dp": 4}), (4, {"dp": 6, "ep": 2})])
def test_narrow_gradients_are_summed_in_fp32_and_rounded_once(experts: int, ranks: dict[str, Any]) -> None:
    """--ddp-reduce-scatter-with-fp32-accumulation; the library rounds each sum of two to bf16. Those of experts are
    summed over fewer ranks, three of the six.
    """
    for (plain, *wide), expected in run_ranks(narrow_gradients, experts, dtype=torch.bfloat16, **ranks):
        assert all(torch.equal(each, expected) for each in wide)
        assert not torch.equal(plain, expected)
        torch.testing.assert_close(plain, expected, rtol=0.05, atol=0.05)


def launches_during_backward(context: ParallelContext) -> list[int]:
    """Reductions under way at the end of an armed backward pass, before ``finish``, in each of three steps."""
    model = Chain(context)
    buffers = build_buffers(model.named_parameters(), context, grad_dtype=torch.float32, bucket_size=700)
    sync = GradSync(buffers, context, weight_gradients=WeightGradients(), sharded=True, overlap=True)
    launched = []
    for _ in range(3):
        sync.zero()
        reducing = mock.patch.object(grad_sync, "reduce_scatter_into_async", wraps=reduce_scatter_into_async)
        with reducing as reduce, sync.last_backward():
            model.loss(samples(context, 0)).backward()  # type: ignore[no-untyped-call]
        launched.append(reduce.call_count)
        sync.finish()
    return [*launched, sum(len(buffer.buckets) for buffer in buffers)]


def test_overlap_reduces_during_backward() -> None:
    """--overlap-grad-reduce would do nothing, as when one gradient never comes through autograd."""
    for first, second, third, buckets in run_ranks(launches_during_backward, dp=2):
        assert (first, second, third) == (0, buckets, buckets)
        assert buckets > 3


def late_gradient(context: ParallelContext) -> str:
    """A parameter that takes part twice in the second step: its bucket is reduced before the second gradient comes."""
    model = Chain(context)
    buffers = build_buffers(model.named_parameters(), context, grad_dtype=torch.float32, bucket_size=700)
    sync = GradSync(buffers, context, weight_gradients=WeightGradients(), sharded=False, overlap=True)
    for step in range(2):
        sync.zero()
        with sync.last_backward():
            model.loss(samples(context, 0)).backward()  # type: ignore[no-untyped-call]
        if step == 1:
            with pytest.raises(ParallelError) as caught:
                model.loss(samples(context, 0)).backward()  # type: ignore[no-untyped-call]
            return str(caught.value)
        sync.finish()
    raise AssertionError("no gradient was late")


def test_a_gradient_that_comes_too_late_is_an_error() -> None:
    """It would be missing from the sum without a word."""
    for message in run_ranks(late_gradient, dp=2):
        assert "matrices.3" in message or "biases.3" in message
        assert "--overlap-grad-reduce" in message


def partial_sums(context: ParallelContext) -> list[list[Tensor]]:
    """Replicated and sharded, see below."""
    return [owned_partial_sums(context, sharded) for sharded in (False, True)]


def owned_partial_sums(context: ParallelContext, sharded: bool) -> list[Tensor]:
    """Owned gradients over their expected values; ones times (tensor-parallel rank + 1) went in on each rank."""
    made = {
        "small": parameter(context, Sharding((30,), partial_grad=("tp",))),
        "whole": parameter(context, Sharding((30,))),
        "large": parameter(context, Sharding((300, 300), partial_grad=("tp",))),
        "tiny": parameter(context, Sharding((7,), partial_grad=("tp",))),
    }
    buffers = build_buffers(made.items(), context, grad_dtype=torch.float32)
    sync = GradSync(buffers, context, weight_gradients=WeightGradients(), sharded=sharded, overlap=False)
    for each in made.values():
        (each.sum() * (context.mesh.rank("tp") + 1)).backward()  # type: ignore[no-untyped-call]
    sync.finish()
    found = []
    for buffer in buffers:
        for bucket in buffer.buckets:
            owned = buffer.shard(bucket) if sharded else bucket.span
            for entry in bucket.entries:
                part = entry.span.overlap(owned)
                if part is not None:
                    factor = 3.0 if entry.sharding.partial_grad else context.mesh.rank("tp") + 1.0
                    found.append(part.of(buffer.grads) / (factor * context.mesh.size("dp")))
    return found


@pytest.mark.parametrize("ranks", [{"tp": 2}, {"tp": 2, "dp": 2}])
def test_partial_gradients_are_summed(ranks: dict[str, Any]) -> None:
    """The field's worst silent bug: a replicated norm weight whose tensor-parallel gradient is never summed."""
    results = run_ranks(partial_sums, **ranks)
    assert all(torch.equal(part, torch.ones_like(part)) for both in results for parts in both for part in parts)
    replicated, sharded = (sum(part.numel() for both in results for part in both[way]) for way in (0, 1))
    assert replicated == (30 + 30 + 300 * 300 + 7) * len(results)
    assert sharded == replicated // ranks.get("dp", 1)


def tied_sums(context: ParallelContext, sharded: bool) -> tuple[int, list[float]]:
    """Values of a tied gradient after sync, on the first and last stage: stage number + 1 went in on each data rank."""
    stage, stages = context.mesh.rank("pp"), context.mesh.size("pp")
    made = {f"layers.{stage}.weight": parameter(context, Sharding((9 + stage, 8)))}
    if stage in (0, stages - 1):
        made[f"copy_on_{stage}"] = parameter(context, Sharding((50, 8), tied="embedding"))
    buffers = build_buffers(made.items(), context, grad_dtype=torch.float32, bucket_size=100)
    sync = GradSync(buffers, context, weight_gradients=WeightGradients(), sharded=sharded, overlap=False)
    for each in made.values():
        (each.sum() * (stage + 1)).backward()  # type: ignore[no-untyped-call]
    sync.finish()
    owned = 0
    values: set[float] = set()
    for buffer in buffers:
        for bucket in buffer.buckets:
            span = buffer.shard(bucket) if sharded else bucket.span
            for entry in bucket.entries:
                part = entry.span.overlap(span)
                if entry.name == "embedding" and part is not None:
                    owned += part.size
                    values |= set(part.of(buffer.grads).tolist())
    return owned, sorted(values)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("stages", [2, 3])
def test_tied_gradients_are_summed_over_stages(stages: int, sharded: bool) -> None:
    """Embedding and output matrix on different stages would drift apart."""
    results = run_ranks(tied_sums, sharded, pp=stages, dp=2)
    holders = [(owned, values) for owned, values in results if owned]
    assert all(values == [2.0 * (1 + stages)] for _, values in holders)
    assert sum(owned for owned, _ in holders) == 400 * 2 * (1 if sharded else 2)
