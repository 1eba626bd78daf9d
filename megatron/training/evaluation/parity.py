"""Comparison of a layout with one rank: a few steps of both in fp64, and every number compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron.core.distributed.buffers import FlatBuffer
from megatron.core.parallel.collectives import all_gather
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.sharding import ShardedState, Sharding
from megatron.errors import ParallelError
from megatron.training.evaluation.first_pass import before_training
from megatron.training.run.run import Run
from megatron.training.step import forward_backward, update_weights

TOLERANCE = 1e-9
"""Tolerance in fp64, where the error of a wrong collective is far above rounding errors."""


@dataclass(frozen=True)
class Part:
    """A rank's rectangle of a logical tensor."""

    offsets: tuple[int, ...]
    values: Tensor


@dataclass
class Observed:
    """Results of some steps on one rank: losses and gradient norms by step, and its parts of logical tensors by name.

    ``losses``: every number that a step reports of its losses and layers. ``gradients``: sums over the first global
    batch. ``shapes``: of the logical tensors.
    """

    losses: dict[str, float] = field(default_factory=dict)
    grad_norms: dict[str, float] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    initial: dict[str, list[Part]] = field(default_factory=dict)
    gradients: dict[str, list[Part]] = field(default_factory=dict)
    weights: dict[str, list[Part]] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """Comparison of one kind of number. ``where``: the first parameter or step beyond the tolerance."""

    kind: str
    count: int
    largest: float
    where: str | None


def observe(run: Run, *, steps: int) -> Observed:
    """Take ``steps`` steps of the run, as training does, and record the results. A collective."""
    before_training(run)
    mesh, sharded = run.context.mesh, run.config.parallel.zero_stage > 0
    seen, batches = Observed(), run.data.training_batches(0)
    seen.shapes = {name: sharding.shape for name, sharding in run.layout().items()}
    seen.initial = parts_of(run.whole_model_state(), mesh)
    for step in range(steps):
        sums = forward_backward(run, next(batches))
        if step == 0:
            seen.gradients = whole_gradients(run.buffers, mesh, sharded=sharded)
        record = update_weights(run, sums)
        at, layer_metrics = f"step {step + 1}", record.layer_metrics.items()
        seen.losses |= {f"{at}, {name}": loss for name, loss in record.losses.items()}
        seen.losses |= {f"{at}, {name} {place}": each for name, row in layer_metrics for place, each in enumerate(row)}
        assert record.grad_norm is not None
        seen.grad_norms[at] = record.grad_norm
    seen.weights = parts_of(run.whole_model_state(), mesh)
    return seen


def whole_gradients(buffers: Iterable[FlatBuffer], mesh: Mesh, *, sharded: bool) -> dict[str, list[Part]]:
    """Gradient sums by parameter; with ``sharded``, gathered from data-parallel ranks. A collective."""
    found = {}
    for buffer in buffers:
        for bucket in buffer.buckets:
            if sharded:
                own, levels = buffer.own_grads(buffer.owned(bucket)).clone(), buffer.levels
                if levels.divides_state:
                    own = all_gather(own, mesh, *levels.outer)
                whole = all_gather(own, mesh, *levels.inner)
            else:
                whole = bucket.span.of(buffer.grads)
            for entry in bucket.entries:
                local = entry.span.moved(-bucket.span.start).of(whole).view(entry.parameter.shape)
                found[entry.name] = parts(local, entry.sharding, mesh)
    return found


def parts_of(state: Iterable[ShardedState], mesh: Mesh) -> dict[str, list[Part]]:
    """This rank's parts of every parameter."""
    return {_name(entry): parts(entry.tensor, entry.sharding, mesh) for entry in state}


def parts(local: Tensor, sharding: Sharding, mesh: Mesh) -> list[Part]:
    """The parts of the logical tensor that a local tensor holds."""
    pieces = sharding.pieces(mesh)
    return [Part(piece.logical, local[piece.slices(of_local=True)].detach().cpu().clone()) for piece in pieces]


def logical(ranks: Sequence[Observed], which: str) -> dict[str, Tensor]:
    """Logical tensors assembled from every rank's parts.

    Raises ParallelError when two ranks hold different values of one part, or no rank holds a part.
    """
    found: dict[str, Tensor] = {}
    for number, rank in enumerate(ranks):
        for name, pieces in getattr(rank, which).items():
            whole = found.setdefault(name, torch.full(rank.shapes[name], float("nan"), dtype=torch.float64))
            for part in pieces:
                held = whole[tuple(slice(o, o + size) for o, size in zip(part.offsets, part.values.shape))]
                if not (held.isnan().all() or torch.equal(held, part.values)):
                    raise ParallelError(
                        f"{which}: rank {number} holds other values of {name} than a rank with the same part"
                    )
                held.copy_(part.values)
    for name, tensor in found.items():
        if tensor.isnan().any():
            raise ParallelError(f"{which}: no rank holds some part of {name}, or it is not a number")
    return found


def compare(ranks: Sequence[Observed], others: Sequence[Observed]) -> list[Comparison]:
    """Compare the results of two layouts, of which the second is usually one rank.

    Initial weights must be bitwise equal, all else equal to ``TOLERANCE``. Raises ParallelError as ``logical`` does.
    """
    found = [
        _compare_numbers("loss", [rank.losses for rank in ranks], others[0].losses),
        _compare_numbers("gradient norm", [rank.grad_norms for rank in ranks], others[0].grad_norms),
    ]
    for kind, which, tolerance in (
        ("initial weights", "initial", 0.0),
        ("gradients", "gradients", TOLERANCE),
        ("weights after the steps", "weights", TOLERANCE),
    ):
        here, there = logical(ranks, which), logical(others, which)
        if missing := here.keys() ^ there.keys():
            raise ParallelError(f"{which}: only one of the two has {', '.join(sorted(missing)[:3])}")
        differences = {name: (here[name] - tensor).abs().max().item() for name, tensor in there.items()}
        beyond = [name for name, difference in differences.items() if not difference <= tolerance]
        found.append(Comparison(kind, len(differences), max(differences.values()), beyond[0] if beyond else None))
    return found


def _compare_numbers(kind: str, by_rank: Sequence[Mapping[str, float]], expected: Mapping[str, float]) -> Comparison:
    assert all(numbers.keys() == expected.keys() for numbers in by_rank), f"both runs report the same {kind}"
    differences = {name: max(abs(numbers[name] - value) for numbers in by_rank) for name, value in expected.items()}
    beyond = [name for name, difference in differences.items() if not difference <= TOLERANCE]
    return Comparison(kind, len(expected), max(differences.values()), beyond[0] if beyond else None)


def _name(entry: ShardedState) -> str:
    return entry.name.removeprefix("model.")
