"""A training run: its parts, and how they are built from the settings."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from megatron.config.run import RunConfig
from megatron.core.device import describe
from megatron.core.diloco.mean import mean_over_workers
from megatron.core.diloco.outer_step import OuterStep
from megatron.core.distributed.buffers import (
    FlatBuffer,
    sharded_weights,
)
from megatron.core.distributed.grad_sync import GradSync
from megatron.core.distributed.units import UnitBorders
from megatron.core.files.remote_path import AnyPath
from megatron.core.models.train_spec import ModelChunk, TrainSpec
from megatron.core.objectives.choice import objective_of
from megatron.core.ops.matmul import is_fusion_faster
from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.optimizer.schedule import Schedule
from megatron.core.parallel.collectives import all_reduce, barrier, gather_objects
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.low_precision import LowPrecision
from megatron.core.parallel.mesh import WORLD
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.products import Products
from megatron.core.parallel.sharding import ShardedState, Sharding
from megatron.core.parallel.side_losses import UpdatedFromCounts, updated_from_counts
from megatron.core.parallel.transport import Transport
from megatron.core.parallel.weight_gradients import WeightGradients
from megatron.core.pipeline_parallel.actions import Action
from megatron.core.pipeline_parallel.runner import Runner
from megatron.core.pipeline_parallel.settings import PipelineSettings
from megatron.core.tensor_parallel.delayed_scaling import DelayedScaling
from megatron.core.tensor_parallel.fp8_linear import delayed_scaling
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.build import build_tokenizer
from megatron.core.tokenizers.chat_settings import ChatSettings, learned_after
from megatron.planning.adapters import check_adapters
from megatron.planning.estimate import active_parameters, flops_per_sample, frozen_parameters, whole_costs
from megatron.planning.mixers import mixer_backends
from megatron.planning.parameter_patterns import check_patterns, check_update_rule
from megatron.planning.stages import with_stages
from megatron.training.guards.spikes import GuardState
from megatron.training.reporting.curves import Curves, open_writers
from megatron.training.reporting.flops import SpeedScale, device_peak
from megatron.training.reporting.memory import check_memory
from megatron.training.reporting.metrics import Evaluation, StepRecord
from megatron.training.reporting.profiling import annotated
from megatron.training.reporting.reporter import Reporter, ReportingRank
from megatron.training.reporting.startup import StartupFacts
from megatron.training.reporting.timers import Timers
from megatron.training.run.attention import attention_choices
from megatron.training.run.data import TrainingData
from megatron.training.run.fp8 import check_fp8, describe_fp8
from megatron.training.run.pipeline import Plans, routes
from megatron.training.run.quantization import trained_operands
from megatron.training.run.stages import buffer_state, build_stages, layout_of, model_state, named_parameters
from megatron.training.run.stop import ExitWatch
from megatron.training.run.training_state import build_training_state


@dataclass
class Progress:
    """How far training is. ``scheduled_samples``: without the samples of steps that were skipped by an overflow."""

    iteration: int = 0
    consumed_samples: int = 0
    scheduled_samples: int = 0


@dataclass(kw_only=True)
class Run:
    """A run on one rank. ``schedule``: None for a run that only evaluates. ``loaded_from``: its checkpoint, if any.
    ``recovered``: whether that is newer than those in ``--save``, see ``checkpoints/tiers.py``.
    ``frozen``: buffers of weights that aren't trained, where those are divided over ranks (ZeRO 3).
    ``borders``: of the units whose gradients or weights are whole for a while only.
    ``loss_names``, ``layer_metric_widths``: what every step reports, as the train spec lists it.
    ``updated_from_counts``: modules that each step adjusts without a gradient. ``scaling``: with --fp8-recipe delayed.
    ``outer``: with --diloco-workers.
    ``base``: the checkpoint with the weights beside which adapters are trained; each checkpoint refers to it.
    ``guards``: what they remember of the steps so far.
    ``spec_state``: what the checkpoint that it goes on from keeps of the train spec.
    ``chat_before``: what the model that this one is made of had learned of conversations.

    ``evaluated``: called on every rank after each evaluation, with the results on each data set by name.
    ``after_step``: each is called on every rank after each step. ``fault``: notes a fault of the hardware at these
    places (host and device).
    """

    config: RunConfig
    train_spec: TrainSpec
    context: ModelContext
    reporter: Reporter
    exit_watch: ExitWatch
    tokenizer: Tokenizer
    models: list[nn.Module]
    buffers: list[FlatBuffer]
    frozen: list[FlatBuffer]
    borders: UnitBorders
    grad_sync: GradSync
    optimizer: Optimizer
    schedule: Schedule | None
    runner: Runner
    plans: Plans
    data: TrainingData
    loss_names: tuple[str, ...]
    layer_metric_widths: Mapping[str, int]
    updated_from_counts: tuple[UpdatedFromCounts, ...] = field(init=False)
    outer: OuterStep | None = None
    scaling: DelayedScaling | None = None
    progress: Progress = field(default_factory=Progress)
    guards: GuardState = field(default_factory=GuardState)
    loaded_from: str | None = None
    recovered: bool = False
    base: AnyPath | None = None
    spec_state: Mapping[str, Any] = field(default_factory=dict)
    chat_before: ChatSettings | None = None
    evaluated: Callable[[Run, Mapping[str, Evaluation]], None] = lambda run, found: None
    after_step: list[Callable[[StepRecord], None]] = field(default_factory=list)
    fault: Callable[[Sequence[str], str], None] = lambda places, what: None

    def __post_init__(self) -> None:
        self.updated_from_counts = updated_from_counts(self.models)

    @property
    def chat(self) -> ChatSettings | None:
        """How the model writes conversations and ends answers, as its data say and the model that it is made of."""
        return learned_after(self.chat_before, self.data.chat)

    def model_state(self) -> Iterator[ShardedState]:
        """Every parameter under its name in a checkpoint; tied copies share one. Of weights that are divided over ranks
        (ZeRO 3) this rank's part.
        """
        if self.config.parallel.zero_stage < 3:
            yield from self.whole_model_state()
        else:
            self.optimizer.gather.forget()  # loading makes whole weights stale
            yield from sharded_weights((*self.buffers, *self.frozen))

    def whole_model_state(self) -> Iterator[ShardedState]:
        """Every parameter as this rank multiplies by it. A collective where weights are divided over ranks."""
        self.optimizer.gather.make_whole()
        yield from model_state(*self.models)

    @contextmanager
    def evaluating(self, *, whole_weights: bool = True) -> Iterator[None]:
        """Put the models into evaluation mode for the block, without dropout.

        ``whole_weights``: with every weight whole, as generation reads them. A collective where they are divided over
        ranks (ZeRO 3).
        """
        if whole_weights:
            self.optimizer.gather.make_whole()
        for model in self.models:
            model.eval()
        try:
            yield
        finally:
            for model in self.models:
                model.train()

    def layout(self) -> dict[str, Sharding]:
        """The layout of every parameter of this rank by its global name."""
        return layout_of(*self.models)

    def buffer_state(self) -> Iterator[ShardedState]:
        """Every buffer that checkpoints hold beside the parameters."""
        return buffer_state(*self.models)

    def release(self) -> None:
        """Make the models torch modules like any other: their parameters lie in no buffer, and no hook collects their
        gradients. The run takes no further step.
        """
        self.optimizer.gather.make_whole()
        self.grad_sync.detach()
        self.borders.detach()
        self.optimizer.gather.detach()
        for _, parameter in named_parameters(self.models):
            parameter.grad = None
            parameter.data = parameter.data.clone()
            if hasattr(parameter, "main_grad"):
                del parameter.main_grad


def build_run(
    config: RunConfig, train_spec: TrainSpec, context: ParallelContext, *, started: float | None = None
) -> Run:
    """Build a run from its settings. ``train_spec``: its family's, which an objective among the settings replaces.
    ``started``: monotonic time of the process's start, for time limits; None: now.

    Raises ConfigError and DataError for vocabularies and data sets that don't fit the settings.
    """
    train_spec, tokenizer = objective_of(config, train_spec), build_tokenizer(config.tokenizer)
    train_spec.check_beside(config.with_vocab_size(tokenizer.vocab_size), tokenizer)
    config = with_stages(config.with_vocab_size(tokenizer.vocab_size), train_spec)
    check_feasible(config, train_spec, context)
    reporter = build_reporter(config, train_spec, context)
    data = TrainingData(config, train_spec, context, tokenizer)
    plans = Plans(PipelineSettings.of(config), context.mesh.rank("pp"))
    model_context = build_model_context(config, context, splits_backward=plans.settings.splits_backward)
    stages, models = build_stages(config, train_spec, model_context)
    scaling = delayed_scaling(models, model_context)
    state = build_training_state(config, models, model_context)

    @contextmanager
    def around(action: Action) -> Iterator[None]:
        with reporter.timers(f"{action.pass_name}-compute", level=2), state.borders.during(action.chunk, action.kind):
            yield

    return Run(
        config=config,
        train_spec=train_spec,
        context=model_context,
        reporter=reporter,
        exit_watch=build_exit_watch(config, context, time.monotonic() if started is None else started),
        tokenizer=tokenizer,
        models=models,
        buffers=state.buffers,
        frozen=state.frozen,
        borders=state.borders,
        grad_sync=state.grad_sync,
        optimizer=state.optimizer,
        outer=build_outer_step(config, state.optimizer, context),
        schedule=build_schedule(config),
        runner=Runner(
            [
                ModelChunk(train_spec, model, stage.is_last, train_spec.stage_inputs(config, stage, context))
                for model, stage in zip(models, stages)
            ],
            transport=Transport(context.mesh, context.device, routes=routes(plans.settings.placement)),
            last_backward=lambda chunk: state.grad_sync.last_backward(),
            weight_gradients=model_context.weight_gradients,
            low_precision=model_context.low_precision,
            operands=model_context.operands,
            device=context.device,
            activity=context.mesh.activity,
            around=around,
        ),
        plans=plans,
        data=data,
        loss_names=train_spec.loss_names(config),
        layer_metric_widths=train_spec.layer_metrics(config),
        scaling=scaling,
    )


def build_outer_step(config: RunConfig, optimizer: Optimizer, context: ParallelContext) -> OuterStep | None:
    """The steps in which workers meet, taken after those of ``optimizer``; None without ``--diloco-workers``."""
    if config.parallel.diloco_workers is None:
        return None
    outer = OuterStep(optimizer, config.diloco, context)
    optimizer.outer_step = outer.after_step
    return outer


def check_feasible(config: RunConfig, train_spec: TrainSpec, context: ParallelContext) -> None:
    """Raise ConfigError for what the model has no parameter for, or this device can't compute or hold."""
    check_adapters(config, train_spec)
    check_patterns(config, train_spec)
    check_update_rule(config, train_spec)
    check_fp8(config, context.device)
    check_memory(config, train_spec, context)


def build_model_context(config: RunConfig, context: ParallelContext, *, splits_backward: bool) -> ModelContext:
    """The services of the run's layers, on this rank. ``splits_backward``: whether the schedule leaves gradients of
    weights for later.
    """
    is_faster = is_fusion_faster(context.dtype, context.device)
    return ModelContext.on(
        replace(context, fills_weights_later=config.parallel.zero_stage == 3),
        weight_gradients=WeightGradients(
            may_wait=splits_backward, fuses_accumulation=config.parallel.fuses_accumulation(is_faster=is_faster)
        ),
        low_precision=LowPrecision(config.fp8, config.num_layers),
        products=Products(),
        operands=trained_operands(config, context.mesh),
    )


def build_schedule(config: RunConfig) -> Schedule | None:
    """Learning rate and weight decay over the run; None when nothing is trained."""
    if config.training.skip_train:
        return None
    return Schedule.from_config(
        config.optimizer,
        train_samples=config.train_samples,
        samples_per_iteration=config.training.global_batch_size,
    )


def build_reporter(config: RunConfig, train_spec: TrainSpec, context: ParallelContext) -> Reporter:
    """The run's reporter on this rank."""
    mesh, reporting = context.mesh, config.reporting
    reporting_rank = ReportingRank(
        rank=mesh.world_rank,
        world_size=mesh.world_size,
        is_first_replica=mesh.rank("dc", "dp", "cp") == 0,
        device=context.device,
        gather=lambda times: gather_objects(times, mesh),
        average=lambda values: mean_over_workers(values, mesh, context.device),
    )
    timers = Timers(
        level=reporting.timing_log_level,
        synchronize=None if context.device.type == "cpu" else torch.accelerator.synchronize,
        barrier=(lambda: barrier(mesh)) if reporting.barrier_with_level_1_timing else None,
        during=annotated(mesh.activity, config, context.device),
    )
    scale = SpeedScale(
        flops_per_sample=flops_per_sample(config, train_spec),
        tokens_per_sample=config.tokens_per_sample,
        world_size=mesh.world_size,
        peak=device_peak(context.device, context.dtype) if reporting.log_throughput else None,
    )
    writers = open_writers(reporting, save=config.checkpoint.save) if reporting_rank.is_last else []
    curves = Curves(reporting, writers, world_size=mesh.world_size)
    curves.settings({spec.positive.removeprefix("--"): config.value(spec) for spec in config.flags()})
    return Reporter(
        reporting,
        reporting_rank,
        train_iters=config.train_iters,
        scale=scale,
        timers=timers,
        curves=curves,
        describe_layer_metrics=partial(train_spec.describe_layer_metrics, config),
    )


def build_exit_watch(config: RunConfig, context: ParallelContext, started: float) -> ExitWatch:
    """Decides with all ranks when the run exits."""

    def highest(values: Sequence[int]) -> list[int]:
        tensor = torch.tensor(values, device=context.device)
        return [int(value) for value in all_reduce(tensor, context.mesh, *WORLD, op="max").tolist()]

    return ExitWatch(config.training, highest=highest, started=started)


def startup_facts(run: Run, *, parameters: int) -> StartupFacts:
    """Facts for the start-up report. ``parameters``: of the whole model.

    Raises ConfigError when ``--attention-backend``, or the flag for the backend of another mixer, can't serve this run.
    """
    return StartupFacts(
        model_name=run.train_spec.name,
        device=describe(run.context.device),
        parameters=parameters,
        parameters_here=sum(sharding.local_elements(run.context.mesh) for sharding in run.layout().values()),
        active=active_parameters(run.config, run.train_spec),
        frozen=frozen_parameters(run.config, run.train_spec),
        flops_per_sample=flops_per_sample(run.config, run.train_spec),
        uncounted=whole_costs(run.config, run.train_spec).uncounted,
        start_iteration=run.progress.iteration,
        loaded_from=run.loaded_from,
        attention=attention_choices(run.config, run.train_spec, run.context),
        mixers=mixer_backends(run.config, run.train_spec, run.context.device),
        fp8=describe_fp8(run.config, run.context.device),
    )
