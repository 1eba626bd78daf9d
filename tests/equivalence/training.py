"""Three optimizer steps of a tiny model at any layout, and what they produced as logical tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.config.parallel import CpCommType
from megatron.config.pipeline import balanced_sizes
from megatron.config.precision import PrecisionConfig
from megatron.core.distributed.buffers import FlatBuffer, build_buffers
from megatron.core.distributed.grad_sync import GradSync
from megatron.core.models.stage import stages_of
from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.parallel.collectives import all_gather, all_reduce
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rng import StreamKey
from megatron.core.parallel.sharding import ShardedState, Sharding
from megatron.core.parallel.transport import Transport
from megatron.core.pipeline_parallel.actions import Placement
from megatron.core.pipeline_parallel.chunk import Microbatch, WireSpec
from megatron.core.pipeline_parallel.runner import Runner
from megatron.core.transformer.block import RecomputePlan
from megatron.training.data import held_slices
from megatron.training.pipeline import PipelineSettings, Plans, routes
from megatron.training.recipe import ModelChunk
from megatron.training.step import loss_weights
from megatron.training.trained_model import model_state, named_parameters, share_tied_parameters
from tests.equivalence.families import FAMILIES, GLOBAL_BATCH, LENGTH, VOCABULARY, Family

STEPS = 3

NOTHING_RECOMPUTED = RecomputePlan()


@dataclass(frozen=True)
class Layout:
    """How ranks divide the work. Sizes of axes are the harness's keywords."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    sequence_parallel: bool = False
    sharded: bool = False
    overlap: bool = False
    bucket_size: int | None = None
    micro_batch_size: int = 2
    recompute: RecomputePlan = NOTHING_RECOMPUTED
    cp_comm_types: tuple[CpCommType, ...] = ("p2p",)
    cp_sizes: tuple[int, ...] = ()
    pp: int = 1
    chunks: int = 1
    schedule: str = "1f1b"
    overlap_p2p: bool = True
    pp_before_dp: bool = True


@dataclass(frozen=True)
class Part:
    """A rank's rectangle of a logical tensor."""

    offsets: tuple[int, ...]
    values: Tensor


@dataclass
class Outcome:
    """What three steps produced on one rank: numbers every rank agrees on, and parts of logical tensors."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    num_zeros: list[int] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    initial: dict[str, list[Part]] = field(default_factory=dict)
    gradients: dict[str, list[Part]] = field(default_factory=dict)
    weights: dict[str, list[Part]] = field(default_factory=dict)


def microbatches(
    step: int, layout: Layout, mesh: Mesh, *, fields: Sequence[str], family: Family = FAMILIES["gpt"]
) -> list[Microbatch]:
    """This rank's microbatches of the global batch; samples keep their global number, whoever gets them."""
    batch = held_slices(family.batch(step), family.recipe.batch_fields, mesh)
    size = layout.micro_batch_size
    stride = size * mesh.size("dp")
    return [
        Microbatch({name: batch[name][start : start + size] for name in fields}, StreamKey(step * GLOBAL_BATCH + start))
        for start in range(size * mesh.rank("dp"), GLOBAL_BATCH, stride)
    ]


def train(context: ParallelContext, settings: Mapping[str, Any], layout: Layout) -> Outcome:
    """Three steps of AdamW at ``layout``."""
    context = replace(context, cp_comm_types=layout.cp_comm_types, cp_sizes=layout.cp_sizes)
    settings = dict(settings)
    family = FAMILIES[settings.pop("family", "gpt")]
    unused = [name for name in family.optional if not settings.pop(name, False)]
    fields = [name for name in family.recipe.batch_fields if name in family.batch(0) and name not in unused]
    config = ModelConfig(max_position_embeddings=LENGTH, vocab_size=VOCABULARY, **settings)
    plans = Plans(
        PipelineSettings(layout.schedule, layout.pp, layout.chunks, None, layout.overlap_p2p), context.mesh.rank("pp")
    )
    context.weight_gradients.may_wait = plans.settings.splits_backward
    chunks = build_chunks(config, context, layout, plans.settings.placement, family)
    models = [chunk.model for chunk in chunks]
    share_tied_parameters(models)
    outcome = Outcome(shapes={name: entry.sharding.shape for name, entry in state_of(models)})
    outcome.initial = {name: parts(entry.tensor, entry.sharding, context.mesh) for name, entry in state_of(models)}

    buffers = build_buffers(named_parameters(models), context, grad_dtype=context.dtype, bucket_size=layout.bucket_size)
    sync = GradSync(buffers, context, sharded=layout.sharded, overlap=layout.overlap)
    optimizer = Optimizer(
        buffers,
        OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_grad=0.5),
        PrecisionConfig(),
        context,
        sharded=layout.sharded,
    )
    runner = Runner(
        chunks,
        transport=Transport(context.mesh, context.device, routes=routes(plans.settings.placement)),
        last_backward=lambda _: sync.last_backward(),
        weight_gradients=context.weight_gradients,
    )
    for step in range(STEPS):
        batch = microbatches(step, layout, context.mesh, fields=fields, family=family)
        weights = loss_weights([family.recipe.counts(each, context) for each in batch], family.losses, context)
        batch = [replace(each, loss_weights=weights) for each in batch]
        sync.zero()
        loss = runner.step(plans.training(len(batch)), batch)
        sync.finish()
        here = torch.zeros(2, dtype=torch.float64) if loss is None else torch.stack((loss.sum, loss.count))
        total = all_reduce(here, context.mesh, "pp", "dp", "cp")
        if step == 0:
            outcome.gradients = gathered_gradients(buffers, context, layout)
        update = optimizer.update(count=total[1].item(), lr=1e-2, weight_decay=0.1)
        outcome.losses.append((total[0] / total[1]).item())
        assert update.grad_norm is not None
        outcome.grad_norms.append(update.grad_norm)
    outcome.weights = {name: parts(entry.tensor, entry.sharding, context.mesh) for name, entry in state_of(models)}
    return outcome


def state_of(models: Sequence[nn.Module]) -> Iterator[tuple[str, ShardedState]]:
    """Every parameter by its global name; tied copies have one."""
    return ((entry.name.removeprefix("model."), entry) for entry in model_state(*models))


def build_chunks(
    config: ModelConfig, context: ParallelContext, layout: Layout, placement: Placement, family: Family
) -> list[ModelChunk]:
    """This rank's parts of the model."""
    mesh = context.mesh
    stages = stages_of(balanced_sizes(config.num_layers, placement.num_stages))
    length = LENGTH // mesh.size("cp") // (mesh.size("tp") if context.sequence_parallel else 1)
    hidden = {"hidden": WireSpec((length, layout.micro_batch_size, config.hidden_size), context.dtype)}
    chunks = []
    for number in placement.stages_of(mesh.rank("pp")):
        stage = stages[number]
        model = family.build(config, context, stage=stage, recompute=layout.recompute, seed=7)
        chunks.append(ModelChunk(family.recipe, model, stage.is_last, {} if stage.is_first else hidden))
    return chunks


def parts(local: Tensor, sharding: Sharding, mesh: Mesh) -> list[Part]:
    """The parts of the logical tensor that a local one holds."""
    return [Part(piece.logical, local[piece.slices(of_local=True)].clone()) for piece in sharding.pieces(mesh)]


def gathered_gradients(
    buffers: Sequence[FlatBuffer], context: ParallelContext, layout: Layout
) -> dict[str, list[Part]]:
    """Gradient sums by parameter; those sharded over data-parallel ranks are gathered first."""
    found = {}
    for buffer in buffers:
        for bucket in buffer.buckets:
            if layout.sharded:
                own = buffer.shard(bucket, context.mesh.rank(*buffer.reduce)).of(buffer.grads).clone()
                bucket.span.of(buffer.grads).copy_(all_gather(own, context.mesh, *buffer.reduce))
            for slot in bucket.slots:
                found[slot.name] = parts(slot.main_grad, slot.sharding, context.mesh)
    return found


def logical(outcomes: Sequence[Outcome], which: str) -> dict[str, Tensor]:
    """Assemble logical tensors from every rank's parts; parts that overlap must agree bit for bit."""
    found: dict[str, Tensor] = {}
    for outcome in outcomes:
        for name, pieces in getattr(outcome, which).items():
            whole = found.setdefault(name, torch.full(outcome.shapes[name], float("nan"), dtype=torch.float64))
            for part in pieces:
                where = tuple(slice(o, o + size) for o, size in zip(part.offsets, part.values.shape))
                held = whole[where]
                assert held.isnan().all() or torch.equal(held, part.values), f"{which}: ranks disagree on {name}"
                whole[where] = part.values
    for name, tensor in found.items():
        assert not tensor.isnan().any(), f"{which}: no rank holds part of {name}"
    return found
