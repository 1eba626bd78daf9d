"""Flat buffers: parameters keep their values and names, gradients land where the optimizer looks, nothing overlaps."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from megatron.core.distributed.buffers import ALIGNMENT, FlatBuffer, Span, build_buffers, lay_out
from megatron.core.distributed.grad_sync import GradSync
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rng import RngStreams
from megatron.core.parallel.sharding import Sharding, sharded_parameter
from megatron.core.parallel.weight_gradients import WeightGradients

SHAPES = {"embedding": (50, 8), "norm": (8,), "fc1": (24, 8), "fc1_bias": (24,), "fc2": (8, 24)}


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    """A small model's parameters with recognisable values."""
    made = {}
    for number, (name, shape) in enumerate(SHAPES.items()):
        made[name] = sharded_parameter(Sharding(shape), Mesh.single(), dtype=dtype, device=torch.device("cpu"))
        nn.init.constant_(made[name], number + 1)
    return made


def forward(p: dict[str, nn.Parameter], tokens: Tensor) -> Tensor:
    """A sum whose gradient reaches every parameter."""
    x = torch.nn.functional.embedding(tokens, p["embedding"]) * p["norm"]
    hidden: Tensor = torch.tanh(x @ p["fc1"].t() * 1e-2 + p["fc1_bias"]) @ p["fc2"].t()
    return hidden.float().sum()


def context_of(mesh: Mesh) -> ParallelContext:
    cpu = torch.device("cpu")
    return ParallelContext(mesh=mesh, rng=RngStreams(1, mesh, cpu), device=cpu, dtype=torch.float32)


@pytest.mark.parametrize("multiple", [64, 192])
@pytest.mark.parametrize("bucket_size", [1, 100, 1000])
def test_layout_places_every_element_once(multiple: int, bucket_size: int) -> None:
    """Two parameters on the same memory, or a shard that cuts a SIMD vector, would corrupt weights silently."""
    for sizes in itertools.product([1, 64, 130], [False, True], [200, 3], [False, True], [77]):
        keys = ["first" if sizes[1] else None, "second" if sizes[3] else None, None]
        members = list(zip(sizes[::2], keys))
        buckets = lay_out(members, bucket_size=bucket_size, multiple=multiple)
        spans = [span for bucket in buckets for span in bucket.members]
        assert [span.size for span in spans] == [size for size, _ in members]
        assert all(before.stop <= after.start for before, after in itertools.pairwise(spans))
        assert all(span.start % ALIGNMENT == 0 for span in spans)
        assert buckets[0].span.start == 0
        assert all(before.span.stop == after.span.start for before, after in itertools.pairwise(buckets))
        assert all(bucket.span.size % multiple == 0 for bucket in buckets)
        for (_, key), span in zip(members, spans):
            (home,) = (bucket for bucket in buckets if span in bucket.members)
            assert home.span.overlap(span) == span
            assert key is None or len(home.members) == 1


def test_buckets_close_when_full() -> None:
    """One bucket for everything leaves nothing to overlap; one for each parameter drowns in small messages."""
    buckets = lay_out([(100, None)] * 6, bucket_size=200, multiple=64)
    assert [len(bucket.members) for bucket in buckets] == [2, 2, 2]


def test_padded_buckets() -> None:
    """--ddp-pad-buckets-for-high-nccl-busbw: each is a multiple of what NCCL sends at full speed."""
    padded = build_buffers(
        parameters().items(), ParallelContext.single(), grad_dtype=torch.float32, bucket_size=100, pads_buckets=True
    )
    sizes = [bucket.span.size for buffer in padded for bucket in buffer.buckets]
    assert len(sizes) > 2 and all(size % (1 << 16) == 0 for size in sizes)


def test_parameters_keep_values_and_become_views() -> None:
    """Weights would be lost, or the optimizer would update memory that the model doesn't read."""
    made = parameters()
    buffers = build_buffers(made.items(), ParallelContext.single(), grad_dtype=torch.float32)
    for number, (name, parameter) in enumerate(made.items()):
        assert torch.equal(parameter, torch.full(SHAPES[name], number + 1.0))
    for buffer in buffers:
        buffer.params.zero_()
    assert all(not parameter.any() for parameter in made.values())


def test_matrices_and_vectors_lie_apart_in_reverse_order() -> None:
    """Weight decay is chosen by buffer, and buckets must fill in the order in which backward completes gradients."""
    buffers = build_buffers(parameters().items(), ParallelContext.single(), grad_dtype=torch.float32)
    names = {buffer.policy.decays: [entry.name for entry in buffer.entries] for buffer in buffers}
    assert names == {True: ["fc2", "fc1", "embedding"], False: ["fc1_bias", "norm"]}


def test_wide_gradients_are_the_buffer_and_stay_it() -> None:
    """If autograd replaced ``.grad`` once, every later gradient would miss the buffer."""
    made, reference = parameters(), parameters()
    buffers = build_buffers(made.items(), ParallelContext.single(), grad_dtype=torch.float32)
    before = {name: parameter.grad for name, parameter in made.items()}
    for tokens in (torch.tensor([1, 2, 3]), torch.tensor([4, 4])):
        forward(made, tokens).backward()  # type: ignore[no-untyped-call]
        forward(reference, tokens).backward()  # type: ignore[no-untyped-call]
    for name, parameter in made.items():
        assert parameter.grad is before[name]
        assert torch.equal(parameter.main_grad, reference[name].grad)  # type: ignore[attr-defined, arg-type]
    assert {buffer.grads.dtype for buffer in buffers} == {torch.float32}


@pytest.mark.parametrize("elements", [7, (1 << 20) + 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_accumulate_adds_any_dtype_in_fp32(dtype: torch.dtype, elements: int) -> None:
    """Low-precision gradients would be added in low precision, or the tail of a large one dropped."""
    parameter = sharded_parameter(Sharding((elements,)), Mesh.single(), dtype=dtype, device=torch.device("cpu"))
    nn.init.zeros_(parameter)
    (buffer,) = build_buffers([("p", parameter)], ParallelContext.single(), grad_dtype=torch.float32)
    (entry,) = buffer.entries
    grads = [torch.randn(elements).to(dtype) for _ in range(3)]
    for grad in grads:
        buffer.accumulate(entry, grad)
    assert torch.equal(entry.main_grad, grads[0].float() + grads[1].float() + grads[2].float())


def test_padding_and_replicas_are_not_counted() -> None:
    """Norms would grow with the number of tensor-parallel ranks, or with vocabulary padding."""

    def counted(rank: int) -> dict[str, list[Span]]:
        mesh = Mesh.of(tp=2, rank=rank)
        vocabulary = Sharding((10, 4), {0: "tp"}, pad_multiple=8)
        made = [
            ("vocabulary", sharded_parameter(vocabulary, mesh, dtype=torch.float32, device=torch.device("cpu"))),
            ("norm", sharded_parameter(Sharding((4,)), mesh, dtype=torch.float32, device=torch.device("cpu"))),
        ]
        buffers = build_buffers(made, context_of(mesh), grad_dtype=torch.float32)
        return {entry.name: list(entry.norm_spans) for buffer in buffers for entry in buffer.entries}

    assert counted(0) == {"vocabulary": [Span(0, 32)], "norm": [Span(0, 4)]}
    assert counted(1) == {"vocabulary": [Span(0, 8)], "norm": []}


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_shards_cover_each_bucket_once(ranks: int) -> None:
    """An element owned by no rank would never be updated."""
    buffers = build_buffers(
        parameters().items(), context_of(Mesh.of(dp=ranks)), grad_dtype=torch.float32, bucket_size=300
    )
    assert any(len(buffer.buckets) > 1 for buffer in buffers)
    for buffer, bucket in ((each, bucket) for each in buffers for bucket in each.buckets):
        shards = [buffer.shard(bucket, replace(buffer.levels, own_shard=index)) for index in range(ranks)]
        assert [shards[0].start, shards[-1].stop] == [bucket.span.start, bucket.span.stop]
        assert all(before.stop == after.start for before, after in itertools.pairwise(shards))


def test_tied_copies_share_a_name_and_lie_alone() -> None:
    """A checkpoint would hold a tied weight's state twice, and its shards would not meet between stages."""
    tied = Sharding((50, 8), tied="embedding.word_embeddings.weight")
    mesh = Mesh.single()
    made = {
        "fc": sharded_parameter(Sharding((8, 8)), mesh, dtype=torch.float32, device=torch.device("cpu")),
        "output_layer.weight": sharded_parameter(tied, mesh, dtype=torch.float32, device=torch.device("cpu")),
    }
    buffer: FlatBuffer
    (buffer,) = build_buffers(made.items(), ParallelContext.single(), grad_dtype=torch.float32)
    names = [[entry.name for entry in bucket.entries] for bucket in buffer.buckets]
    assert names == [["embedding.word_embeddings.weight"], ["fc"]]


def test_no_gradient_outlives_its_step() -> None:
    """A parameter that a step leaves out would be updated with the gradient of the step before."""
    made, reference = parameters(torch.bfloat16), parameters(torch.bfloat16)
    sync = GradSync(
        build_buffers(made.items(), ParallelContext.single(), grad_dtype=torch.float32),
        ParallelContext.single(),
        weight_gradients=WeightGradients(),
        sharded=False,
        overlap=False,
    )
    for left_out in ("nothing", "fc2"):
        sync.zero()
        for tokens in (torch.tensor([1, 2, 3]), torch.tensor([4, 4])):
            for each in (made, reference):
                used = {name: nn.Parameter(p.detach()) if name == left_out else p for name, p in each.items()}
                forward(used, tokens).backward()  # type: ignore[no-untyped-call]
        sync.finish()
        for name, parameter in made.items():
            grad = reference[name].grad
            expected = torch.zeros_like(parameter) if grad is None else grad
            torch.testing.assert_close(parameter.main_grad, expected.float(), rtol=2e-2, atol=1e-2)  # type: ignore[attr-defined]
            reference[name].grad = None
