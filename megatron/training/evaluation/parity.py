"""Comparison of a layout with one rank: a few steps of both in fp64, and every number compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron.config.run import RunConfig
from megatron.core.distributed.buffers import FlatBuffer
from megatron.core.models.train_spec import TrainSpec
from megatron.core.parallel.collectives import all_gather
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.sharding import ShardedState, Sharding
from megatron.errors import ParallelError
from megatron.training.run.run import build_run
from megatron.training.step import global_layer_metrics, global_loss, update_from_layer_metrics, with_gradient_scales

TOLERANCE = 1e-9
"""Tolerance in fp64, where the error of a wrong collective is far above rounding errors."""


@dataclass(frozen=True)
class Part:
    """A rank's rectangle of a logical tensor."""

    offsets: tuple[int, ...]
    values: Tensor


@dataclass
class Observed:
    """Results of some steps on one rank: losses and norms, and its parts of logical tensors by name.

    ``gradients``: sums over the first global batch. ``shapes``: of the logical tensors.
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
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


def observe(config: RunConfig, train_spec: TrainSpec, context: ParallelContext, *, steps: int) -> Observed:
    """Take ``steps`` steps of the run, as training does, and record the results. A collective."""
    run = build_run(config, train_spec, context, started=0.0)
    seen, batches = Observed(), run.data.training_batches(0)
    seen.shapes = {_name(entry): entry.sharding.shape for entry in run.model_state()}
    seen.initial = parts_of(run.model_state(), context.mesh)
    for step in range(steps):
        microbatches = with_gradient_scales(run, next(batches))
        run.grad_sync.zero()
        loss = run.runner.step(run.plans.training(len(microbatches)), microbatches)
        run.grad_sync.finish()
        total = global_loss(loss, train_spec.loss_names(run.config), context)
        if step == 0:
            seen.gradients = whole_gradients(
                run.buffers, context.mesh, sharded=run.config.parallel.use_distributed_optimizer
            )
        update = run.optimizer.update(count=total.count, lr=1e-2, weight_decay=0.1)
        update_from_layer_metrics(run.models, global_layer_metrics(loss, train_spec.layer_metrics(run.config), context))
        seen.losses.append(sum(total.means.values()))
        seen.grad_norms.append(update.grad_norm)
    seen.weights = parts_of(run.model_state(), context.mesh)
    return seen


def whole_gradients(buffers: Iterable[FlatBuffer], mesh: Mesh, *, sharded: bool) -> dict[str, list[Part]]:
    """Gradient sums by parameter; with ``sharded``, gathered from data-parallel ranks. A collective."""
    found = {}
    for buffer in buffers:
        for bucket in buffer.buckets:
            if sharded:
                own = buffer.shard(bucket).of(buffer.grads).clone()
                bucket.span.of(buffer.grads).copy_(all_gather(own, mesh, *buffer.reduce))
            for entry in bucket.entries:
                found[entry.name] = parts(entry.main_grad, entry.sharding, mesh)
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


def _compare_numbers(kind: str, by_rank: Sequence[Sequence[float]], expected: Sequence[float]) -> Comparison:
    largest, where = 0.0, None
    for step, value in enumerate(expected):
        difference = max(abs(numbers[step] - value) for numbers in by_rank)
        largest = max(largest, difference)
        if not difference <= TOLERANCE and where is None:
            where = f"step {step + 1}"
    return Comparison(kind, len(expected), largest, where)


def _name(entry: ShardedState) -> str:
    return entry.name.removeprefix("model.")
