"""A small model on any layout, and a world of ranks as threads of one process, for checkpoint tests in milliseconds."""

from __future__ import annotations

import math
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar
from unittest import mock

import torch
from torch import Tensor

from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.sharding import ShardedState, Sharding, SharedRows, StackedPart

T = TypeVar("T")

NUM_LAYERS = 4
VOCABULARY = 61  # large enough that ZeRO cuts the tied copies on first and last stage differently

EMBEDDING = Sharding((VOCABULARY, 12), split={0: "tp"}, pad_multiple=4, tied="word_embeddings")
OTHER_ENDS = {
    "final_layernorm.weight": Sharding((12,)),
    "scale": Sharding(()),
}
GATED = (StackedPart(12), StackedPart(12))
LAYER = {
    "input_layernorm.weight": Sharding((12,), partial_grad=("tp",)),
    "linear_qkv.weight": Sharding((24, 12), split={0: "tp"}),
    "linear_shared.weight": Sharding((20, 12), split={0: "tp"}, shared=SharedRows(groups=1, rows=8)),
    "linear_fc1.weight": Sharding((24, 12), split={0: "tp"}, parts=GATED),
    "linear_fc1.bias": Sharding((24,), split={0: "tp"}, parts=GATED),
    "in_proj.weight": Sharding((30, 12), split={0: "tp"}, parts=(StackedPart(24), StackedPart(6, groups=1))),
    "linear_fc2.weight": Sharding((12, 24), split={1: "tp"}),
}


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes, and whether each data-parallel rank owns a range of the optimizer's state (ZeRO-1).

    ``vpp``: parts of the model on each pipeline rank, dealt out in turn.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    zero: bool = False
    vpp: int = 1

    def meshes(self) -> list[Mesh]:
        """Every rank's mesh."""
        world_size = self.tp * self.pp * self.dp * self.cp
        return [Mesh.of(tp=self.tp, pp=self.pp, dp=self.dp, cp=self.cp, rank=rank) for rank in range(world_size)]


def parameters_on(mesh: Mesh, *, vpp: int = 1) -> dict[str, Sharding]:
    """The parameters of this rank's stages; first and last stage both hold the tied embedding, in another order."""
    stages, stage = mesh.size("pp"), mesh.rank("pp")
    here: dict[str, Sharding] = {}
    if stage == 0:
        here["embedding.weight"] = EMBEDDING
    for layer in range(NUM_LAYERS):
        if layer * stages * vpp // NUM_LAYERS % stages == stage:
            here.update({f"layers.{layer}.{name}": sharding for name, sharding in LAYER.items()})
    if stage == stages - 1:
        here.update(OTHER_ENDS)
        here.setdefault("embedding.weight", EMBEDDING)
    return here


def logical_values(seed: int) -> dict[str, Tensor]:
    """What a checkpoint of the model means, whatever its layout: every logical tensor by name."""
    generator = torch.Generator().manual_seed(seed)
    values: dict[str, Tensor] = {}
    for name, sharding in sorted(parameters_on(Mesh.single()).items()):
        for kind in ("model", "optimizer.exp_avg", "optimizer.fp32_param"):
            values[f"{kind}.{name}"] = torch.randn(sharding.shape, generator=generator)
    return values


def local_shard(value: Tensor, sharding: Sharding, mesh: Mesh) -> Tensor:
    """This rank's part of a logical tensor; padding is NaN, so that it shows wherever it leaks."""
    local = torch.full(sharding.local_shape(mesh), math.nan, dtype=value.dtype)
    for piece in sharding.pieces(mesh):
        local[piece.slices(of_local=True)] = value[piece.slices(of_local=False)]
    return local


def state_of(
    layout: Layout, mesh: Mesh, values: Mapping[str, Tensor] | None, **options: torch.dtype
) -> list[ShardedState]:
    """Weights and optimizer state of one rank, filled from ``values``, or with NaN to be loaded into."""
    dtype = options.get("model_dtype", torch.float32)
    filled = values or {name: torch.full_like(value, math.nan) for name, value in logical_values(0).items()}
    here = parameters_on(mesh, vpp=layout.vpp)
    states = []
    for name, sharding in here.items():
        states.append(
            ShardedState(f"model.{name}", local_shard(filled[f"model.{name}"], sharding, mesh).to(dtype), sharding)
        )
    for kind in ("optimizer.exp_avg", "optimizer.fp32_param"):
        shards = {name: local_shard(filled[f"{kind}.{name}"], sharding, mesh) for name, sharding in here.items()}
        ranges = owned_ranges(here, mesh) if layout.zero else dict.fromkeys(here)
        for name, owned in ranges.items():
            tensor = shards[name] if owned is None else shards[name].flatten()[owned[0] : owned[1]].clone()
            states.append(ShardedState(f"{kind}.{name}", tensor, here[name], owned))
    return states


def owned_ranges(here: Mapping[str, Sharding], mesh: Mesh) -> dict[str, tuple[int, int]]:
    """ZeRO-1: this rank's equal slice of all local shards laid end to end, as a range of each."""
    sizes = {name: math.prod(sharding.local_shape(mesh)) for name, sharding in reversed(list(here.items()))}
    width = math.ceil(sum(sizes.values()) / mesh.size("dp", "cp"))
    start = width * mesh.rank("dp", "cp")
    ranges, at = {}, 0
    for name, size in sizes.items():
        low, high = max(start, at), min(start + width, at + size)
        if low < high:
            ranges[name] = (low - at, high - at)
        at += size
    return ranges


def assert_holds(states: Iterable[ShardedState], mesh: Mesh, values: Mapping[str, Tensor]) -> None:
    """Every number of every local tensor is the one that belongs there; padding is as it was."""
    for state in states:
        expected = local_shard(values[state.name], state.sharding, mesh).to(state.tensor.dtype)
        if state.flat_range is not None:
            expected = expected.flatten()[slice(*state.flat_range)]
        assert torch.equal(state.tensor.nan_to_num(-77), expected.nan_to_num(-77)), state.name


@contextmanager
def threads_as_ranks(size: int) -> Iterator[None]:
    """Make ``gather_objects`` of the checkpoint code connect ``size`` threads, each with its own mesh."""
    barrier = threading.Barrier(size, timeout=120)
    slots: list[bytes] = [b""] * size

    def gather_objects(value: T, mesh: Mesh) -> list[T]:
        slots[mesh.world_rank] = pickle.dumps(value)
        barrier.wait()
        values = [pickle.loads(slot) for slot in slots]
        barrier.wait()
        return values

    with mock.patch("megatron.core.checkpointing.agreement.gather_objects", gather_objects):
        yield


def on_ranks(meshes: list[Mesh], work: Callable[[Mesh], T]) -> list[T]:
    """``work(mesh)`` on every rank at once; raises the lowest failing rank's error."""
    with threads_as_ranks(len(meshes)), ThreadPoolExecutor(len(meshes)) as pool:
        futures = [pool.submit(work, mesh) for mesh in meshes]
        return [future.result() for future in futures]
