"""Random streams are functions of (seed, split, sample, place): what may change the numbers, and what must not."""

from __future__ import annotations

import torch

from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rng import RngStreams, StreamKey, derive_seed

CPU = torch.device("cpu")


def draw(
    mesh: Mesh, *, seed: int = 1, sample: int = 40, split: str = "train", place: str = "layer 3"
) -> tuple[int, int]:
    """One number of each stream at a place."""
    streams = RngStreams(seed, mesh, CPU)
    streams.enter(StreamKey(sample, split), place)
    limit = 2**62
    return (
        int(torch.randint(limit, (), generator=streams.replicated)),
        int(torch.randint(limit, (), generator=streams.split)),
    )


def test_seeds_are_the_same_on_every_machine() -> None:
    """Pinned: initial weights and dropout of a published seed must not change with a Python or project release."""
    assert derive_seed(1234, "decoder.layers.0.mlp.linear_fc1.weight") == 7921975215998007869
    assert derive_seed("a") == 1702698405120146464


def test_seeds_are_63_bit_and_distinct() -> None:
    """torch takes no larger seed; and two parameters with one seed would start alike."""
    seeds = {derive_seed(seed, name) for seed in range(100) for name in range(100)}
    assert len(seeds) == 10_000
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_parts_of_a_seed_do_not_run_together() -> None:
    """(1, 23) and (12, 3) are different places."""
    assert derive_seed(1, 23) != derive_seed(12, 3)


def test_tensor_parallel_ranks_share_one_stream_and_not_the_other() -> None:
    """Dropout on replicated activations must agree between them, on split ones it must not repeat."""
    draws = [draw(Mesh.of(tp=4, rank=rank)) for rank in range(4)]
    assert len({replicated for replicated, _ in draws}) == 1
    assert len({split for _, split in draws}) == 4


def test_context_parallel_ranks_draw_apart() -> None:
    """They hold different tokens: a shared mask would repeat along the sequence."""
    draws = [draw(Mesh.of(tp=2, cp=2, rank=rank)) for rank in range(4)]
    assert len({replicated for replicated, _ in draws}) == 2
    assert len({split for _, split in draws}) == 4


def test_data_and_pipeline_position_do_not_enter() -> None:
    """The sample says it all: resume at another data- or pipeline-parallel size continues with the same masks."""
    layouts = [Mesh.of(dp=4, rank=3), Mesh.of(pp=4, rank=2), Mesh.of(dp=2, pp=2, rank=1, pp_before_dp=False)]
    assert {draw(mesh) for mesh in layouts} == {draw(Mesh.single())}


def test_everything_named_changes_the_numbers() -> None:
    """A stream that ignored one of these would repeat dropout masks along it."""
    mesh = Mesh.single()
    draws = [
        draw(mesh),
        draw(mesh, seed=2),
        draw(mesh, sample=41),
        draw(mesh, split="valid"),
        draw(mesh, place="layer 4"),
    ]
    assert len({value for pair in draws for value in pair}) == 2 * len(draws)


def test_entering_again_replays() -> None:
    """Recomputation in backward sees the masks of forward, bitwise, even after other draws."""
    streams = RngStreams(7, Mesh.single(), CPU)
    key = StreamKey(12)
    streams.enter(key, "layer 0")
    first = torch.rand(5, generator=streams.split)
    streams.enter(key, "layer 1")
    torch.rand(100, generator=streams.split)
    streams.enter(key, "layer 0")
    assert torch.equal(torch.rand(5, generator=streams.split), first)
