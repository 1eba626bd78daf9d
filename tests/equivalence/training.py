"""Three optimizer steps of a tiny model at any layout, and what they produced as logical tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron.config.fp8 import Fp8Config
from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.config.parallel import CpCommType
from megatron.config.pipeline import balanced_sizes, stages_of
from megatron.config.precision import PrecisionConfig
from megatron.core.conversion.portable import load_weights
from megatron.core.distributed.buffers import FlatBuffer, build_buffers
from megatron.core.distributed.grad_sync import GradSync
from megatron.core.distributed.parameter_policy import parameter_policies
from megatron.core.models.bert.train_spec import ORDER
from megatron.core.models.train_spec import ModelChunk
from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.parallel.collectives import all_reduce
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rng import StreamKey
from megatron.core.parallel.transport import Transport
from megatron.core.pipeline_parallel.actions import Placement
from megatron.core.pipeline_parallel.chunk import Microbatch, TensorSpec
from megatron.core.pipeline_parallel.runner import Runner
from megatron.core.pipeline_parallel.settings import PipelineSettings
from megatron.core.tensor_parallel.fp8_linear import delayed_scaling, weight_quantizers
from megatron.core.transformer.block import RecomputePlan
from megatron.training.evaluation.parity import Observed, parts_of, whole_gradients
from megatron.training.run.data import held_slices
from megatron.training.run.pipeline import Plans, routes
from megatron.training.run.stages import model_state, named_parameters, share_tied_parameters
from megatron.training.step import (
    global_layer_metrics,
    global_loss,
    loss_weights,
    total_counts,
    update_from_layer_metrics,
)
from tests.equivalence.families import (
    FAMILIES,
    GLOBAL_BATCH,
    LENGTH,
    VOCABULARY,
    Family,
    family_of_published,
    family_with_groups,
)

STEPS = 3

NOTHING_RECOMPUTED = RecomputePlan()


@dataclass(frozen=True)
class Layout:
    """How ranks divide the work. Sizes of axes are the harness's keywords. ``stage_sizes``: evenly, unless given."""

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
    stage_sizes: tuple[int, ...] = ()
    ep: int = 1
    etp: int | None = None
    fuses_accumulation: bool = False

    def grad_sync(self, buffers: list[FlatBuffer], context: ParallelContext) -> GradSync:
        """That of a rank."""
        options = {"sharded": self.sharded, "overlap": self.overlap, "fuses_accumulation": self.fuses_accumulation}
        return GradSync(buffers, context, **options)


def microbatches(
    step: int, layout: Layout, mesh: Mesh, *, fields: Sequence[str], family: Family = FAMILIES["gpt"]
) -> list[Microbatch]:
    """This rank's microbatches of the global batch; samples keep their global number, whoever gets them."""
    batch = held_slices(family.batch(step), family.train_spec.batch_fields, mesh)
    size = layout.micro_batch_size
    stride = size * mesh.size("dp")
    return [
        Microbatch({name: batch[name][start : start + size] for name in fields}, StreamKey(step * GLOBAL_BATCH + start))
        for start in range(size * mesh.rank("dp"), GLOBAL_BATCH, stride)
    ]


def train(context: ParallelContext, settings: Mapping[str, Any], layout: Layout) -> Observed:
    """Three steps of AdamW at ``layout``, of a model with ``settings`` or of the ``published`` one."""
    context = replace(context, cp_comm_types=layout.cp_comm_types, cp_sizes=layout.cp_sizes)
    settings = dict(settings)
    family, freeze = FAMILIES[settings.pop("family", "gpt")], settings.pop("freeze", ())
    multipliers = settings.pop("lr_multipliers", ())
    published = settings.pop("published", None)
    fp8 = Fp8Config(**settings.pop("fp8", {}))
    family = family_of_published(published) if published else family
    family = family_with_groups(family, settings.pop("groups", ()))
    unused = [name for name in family.optional if not settings.pop(name, False)]
    unused += [] if ORDER in family.losses else ["is_random"]
    fields = [name for name in family.train_spec.batch_fields if name in family.batch(0) and name not in unused]
    if published:
        config = published.model
    else:
        config = ModelConfig(max_position_embeddings=LENGTH, vocab_size=VOCABULARY, **settings)
    plans = Plans(
        PipelineSettings(layout.schedule, layout.pp, layout.chunks, None, layout.overlap_p2p), context.mesh.rank("pp")
    )
    context.weight_gradients.may_wait = plans.settings.splits_backward
    context.low_precision.configure(fp8, num_layers=config.num_layers + family.more_layers)
    chunks = build_chunks(config, context, layout, plans.settings.placement, family)
    models = [chunk.model for chunk in chunks]
    delayed_scaling(models, context)
    share_tied_parameters(models)
    for model in models if published else ():
        load_weights(model, published, context.mesh)
    outcome = Observed(
        shapes={entry.name.removeprefix("model."): entry.sharding.shape for entry in model_state(*models)},
        initial=parts_of(model_state(*models), context.mesh),
    )

    policies = parameter_policies(named_parameters(models), OptimizerConfig(freeze=freeze, lr_multipliers=multipliers))
    buffers = build_buffers(
        named_parameters(models),
        context,
        grad_dtype=context.dtype,
        bucket_size=layout.bucket_size,
        quantizers=weight_quantizers(models) if fp8.fp8_param_gather else None,
        policies=policies,
    )
    sync = layout.grad_sync(buffers, context)
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
        low_precision=context.low_precision,
    )
    for step in range(STEPS):
        batch = microbatches(step, layout, context.mesh, fields=fields, family=family)
        totals = total_counts([family.train_spec.counts(each, context) for each in batch], family.losses, context)
        weights = loss_weights(totals) if len(family.losses) > 1 else {}
        batch = [replace(each, loss_weights=weights) for each in batch]
        sync.zero()
        loss = runner.step(plans.training(len(batch)), batch)
        sync.finish()
        here = torch.zeros(2, dtype=torch.float64) if loss is None else torch.stack((loss.sum, loss.count)).double()
        total = all_reduce(here, context.mesh, "pp", "dp", "cp")
        parts = global_loss(loss, family.losses, context)
        if step == 0:
            outcome.gradients = whole_gradients(buffers, context.mesh, sharded=layout.sharded)
        update = optimizer.update(count=total[1].item(), lr=1e-2, weight_decay=0.1)
        counted = global_layer_metrics(loss, family.layer_metrics(config), context)
        update_from_layer_metrics(models, counted)
        outcome.losses += [float(number) for each in counted.values() for number in each]
        outcome.losses += [(total[0] / total[1]).item(), *parts.means.values()]
        assert update.grad_norm is not None
        outcome.grad_norms.append(update.grad_norm)
    optimizer.gather.make_whole()
    outcome.weights = parts_of(model_state(*models), context.mesh)
    return outcome


def build_chunks(
    config: ModelConfig, context: ParallelContext, layout: Layout, placement: Placement, family: Family
) -> list[ModelChunk]:
    """This rank's parts of the model."""
    mesh = context.mesh
    sizes = layout.stage_sizes or balanced_sizes(config.num_layers + family.more_layers, placement.num_stages)
    stages = stages_of(sizes)
    share = mesh.size("cp") * (mesh.size("tp") if context.sequence_parallel else 1)

    def hidden(length: int) -> TensorSpec:
        return TensorSpec(
            (length // share, layout.micro_batch_size * family.sequences, config.hidden_size), context.dtype
        )

    chunks = []
    for number in placement.stages_of(mesh.rank("pp")):
        stage = stages[number]
        model = family.build(config, context, stage=stage, recompute=layout.recompute, seed=7)
        stage_inputs = {} if stage.is_first else family.stage_inputs(config, stage, hidden)
        chunks.append(ModelChunk(family.train_spec, model, stage.is_last, stage_inputs))
    return chunks
