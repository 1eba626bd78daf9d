"""Distillation as an objective: a frozen teacher runs beside the student, and its distributions are in the loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from typing_extensions import override

from megatron.config.distillation import DistillationConfig
from megatron.config.lora import LoraConfig
from megatron.config.model import ModelConfig
from megatron.config.pipeline import Stage, model_stages
from megatron.config.run import RunConfig
from megatron.core.models.train_spec import TrainSpec
from megatron.core.objectives.hidden_states import TOKENS, HiddenStateLosses, stage_of_pair
from megatron.core.objectives.taught import TaughtObjective
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.costs import Costs, Workload
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.sharding import ShardedState, sharded_parameters
from megatron.core.pipeline_parallel.chunk import CONSTANT, LossSum, Microbatch, StageInputs, TensorSpec
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.transformer.block import RecomputePlan
from megatron.core.transformer.output_layer import VocabularyOutput, distillation_bytes
from megatron.errors import ConfigError

_TEACHER = f"{CONSTANT}teacher "


class TeacherSource(Protocol):
    """Where a teacher's weights are."""

    @property
    def words(self) -> str:
        """The teacher in words, for the log."""
        ...

    def check(self, run: RunConfig, tokenizer: Tokenizer) -> None:
        """Raise MegatronError for a teacher that can't teach this run's model, or doesn't fit its layout."""
        ...

    def fill(self, state: Iterable[ShardedState], mesh: Mesh) -> None:
        """Fill a rank's part of its weights. A collective."""
        ...


@dataclass(frozen=True)
class Teacher:
    """A model to learn from: its settings, whose depth and widths are its own, its ``family``, and its weights."""

    model: ModelConfig
    groups: tuple[object, ...]
    family: TrainSpec
    source: TeacherSource

    def run(self, run: RunConfig) -> RunConfig:
        """A run of the teacher in place of the student."""
        model = dataclasses.replace(self.model, make_vocab_size_divisible_by=run.model.make_vocab_size_divisible_by)
        return dataclasses.replace(run, model=model, extra=self.groups)

    def stage(self, stage: Stage, layers: int) -> Stage:
        """The teacher's part beside a ``stage`` of a student with so many ``layers``: the same share of its depth."""
        own = self.model.num_layers
        start, stop = (round(place * own / max(layers, 1)) for place in (stage.layers.start, stage.layers.stop))
        return dataclasses.replace(stage, layers=range(0 if stage.is_first else start, own if stage.is_last else stop))


@dataclass(frozen=True)
class TaughtOutput:
    """The outputs of both models on the last stage."""

    student: VocabularyOutput
    teacher: VocabularyOutput


@dataclass(frozen=True)
class _Part:
    """The teacher's part beside one of the student's."""

    module: nn.Module
    stage: Stage


class DistillationObjective(TaughtObjective):
    """The divergence from a teacher that runs beside the student, and the family's own loss."""

    def __init__(self, family: TrainSpec, settings: DistillationConfig, teacher: Teacher) -> None:
        super().__init__(family, settings)
        self._teacher = teacher
        self._hidden_states = HiddenStateLosses(settings)
        if self._hidden_states.pairs:
            self.batch_fields = {**self.batch_fields, TOKENS: 1}
        self._beside = WeakKeyDictionary[nn.Module, _Part]()

    @override
    def loss_names(self, run: RunConfig) -> tuple[str, ...]:
        """The family's, the divergence, and distances of hidden states."""
        return (*super().loss_names(run), *self._hidden_states.names)

    @override
    def counts(self, microbatch: Microbatch, context: ParallelContext) -> Mapping[str, Tensor]:
        """The family's; all others are of the tokens of its first loss."""
        found = super().counts(microbatch, context)
        return {**found, **dict.fromkeys(self._hidden_states.names, next(iter(found.values())))} if found else found

    @override
    def fields(self, run: RunConfig, stages: Sequence[Stage]) -> frozenset[str]:
        """What either model needs, and which tokens count, where hidden states are compared."""
        both = super().fields(run, stages) | self._teacher.family.fields(self._teacher.run(run), stages)
        return both | frozenset((TOKENS,) if self._hidden_states.pairs and stages else ())

    @override
    def add_derived_fields(self, batch: Mapping[str, Tensor], run: RunConfig) -> Mapping[str, Tensor]:
        """The family's fields, and the loss mask for stages without that loss."""
        found = super().add_derived_fields(batch, run)
        has_pairs = self._hidden_states.pairs and "loss_mask" in found
        return {**found, TOKENS: found["loss_mask"]} if has_pairs else found

    @override
    def stage_inputs(self, run: RunConfig, stage: Stage, context: ParallelContext) -> Mapping[str, TensorSpec]:
        """The student's, and the teacher's, which have no gradient."""
        teacher = self._teacher.run(run)
        theirs = self._teacher.family.stage_inputs(teacher, self._teacher.stage(stage, run.num_layers), context)
        return {**super().stage_inputs(run, stage, context), **{_TEACHER + name: spec for name, spec in theirs.items()}}

    @override
    def build_model(
        self,
        model: ModelConfig,
        groups: Sequence[object],
        context: ModelContext,
        *,
        stage: Stage | None = None,
        recompute: RecomputePlan | None = None,
        seed: int | None = None,
    ) -> nn.Module:
        """The student's part; beside it is the teacher's, without values, which is no part of the module: what trains,
        divides or saves a model doesn't find it.
        """
        student = super().build_model(model, groups, context, stage=stage, recompute=recompute, seed=seed)
        config = dataclasses.replace(
            self._teacher.model, make_vocab_size_divisible_by=model.make_vocab_size_divisible_by
        )
        whole = Stage(range(model.num_layers), is_first=True, is_last=True)
        place = self._teacher.stage(stage or whole, model.num_layers)
        rank = dataclasses.replace(context, fills_weights_later=False)
        beside = self._teacher.family.build_model(
            config,
            self._teacher.groups,
            ModelContext.plain(rank),
            stage=place,
        )
        self._beside[student] = _Part(beside.requires_grad_(requires_grad=False).eval(), place)
        widths = model.hidden_size, config.hidden_size
        self._hidden_states.attach(student, beside, widths=widths, context=context, seed=seed)
        return student

    @override
    def beside(self, model: nn.Module) -> nn.Module | None:
        """The teacher's part."""
        return self._beside[model].module

    @override
    def check_beside(self, run: RunConfig, tokenizer: Tokenizer) -> Sequence[str]:
        """The teacher, which must know the same vocabulary and fit the layout."""
        self._teacher.source.check(run, tokenizer)
        self._check_pairs(run)
        return (f"teacher: {self._teacher.source.words}",)

    def _check_pairs(self, run: RunConfig) -> None:
        """Raise ConfigError for pairs of layers that the teacher hasn't got, or that lie on different stages."""
        pairs, last, flag = self._hidden_states.pairs, self._teacher.model.num_layers - 1, "--distill-hidden-states"
        stages = [stage.layers for stage in model_stages(run)]
        theirs = [self._teacher.stage(stage, run.num_layers).layers for stage in model_stages(run)]
        for pair in pairs:
            if pair.teacher is not None and pair.teacher > last:
                raise ConfigError(f"{flag} names layer {pair.teacher} of the teacher, whose layers are 0 to {last}")
            at, there = stage_of_pair(pair, stages, theirs)
            if at != there:
                ours, other = ("final" if each is None else f"layer {each}" for each in (pair.student, pair.teacher))
                raise ConfigError(
                    f"{flag}: {ours} of the student is on pipeline stage {at}, and {other} of the teacher on stage "
                    f"{there}; name one of layers {theirs[at].start} to {theirs[at].stop - 1} of the teacher, which "
                    "are beside it"
                )
        widths = run.model.hidden_size, self._teacher.model.hidden_size
        if pairs and run.part(LoraConfig).is_on and widths[0] != widths[1]:
            raise ConfigError(
                f"{flag} trains matrices between hidden sizes {widths[0]} and {widths[1]}, and --lora-rank trains "
                "adapters alone: leave one of them out"
            )

    @override
    def load_beside(self, models: Sequence[nn.Module], mesh: Mesh) -> str | None:
        """Load the teacher."""
        parts = filter(None, map(self.beside, models))
        state = [
            ShardedState(f"model.{sharding.tied or name}", parameter.detach(), sharding)
            for part in parts
            for name, parameter, sharding in sharded_parameters(part)
        ]
        self._teacher.source.fill(state, mesh)
        return f"learning from {self._teacher.source.words}"

    @override
    def costs(self, model: nn.Module, workload: Workload) -> Costs:
        """The student's costs, and the teacher's forward pass: nothing of it is kept for a backward pass."""
        part = self._beside[model]
        alone = dataclasses.replace(workload, visit=None, with_unit=lambda of, costs: costs)
        ours, theirs = super().costs(model, workload), self._teacher.family.costs(part.module, alone)
        ours = ours + self._hidden_states.costs(model, self._teacher.model.hidden_size, workload)
        forward = Costs(
            flops=theirs.flops,
            frozen_flops=2 * theirs.flops,  # neither product of a backward pass
            working=theirs.kept // max(len(part.stage.layers), 1),
            uncounted=theirs.uncounted,
            exchanged=theirs.exchanged // 2,
        )
        found, of_loss = forward + ours, 0
        if part.stage.is_last:
            ranks = workload.context.mesh.size("tp")
            rows = self._teacher.model.padded_vocab_size(ranks) // ranks
            of_loss = distillation_bytes(rows, workload, tempered=self._settings.temperature != 1.0)
        return dataclasses.replace(found, working=max(forward.working, ours.working + of_loss))

    @override
    def forward(self, model: nn.Module, stage_inputs: StageInputs, microbatch: Microbatch) -> Any:
        """Both models through this stage, the teacher first: what it needs is free again when the student begins."""
        beside = self._beside[model].module
        own = {name: tensor for name, tensor in stage_inputs.items() if not name.startswith(_TEACHER)}
        theirs = {name.removeprefix(_TEACHER): each for name, each in stage_inputs.items() if name.startswith(_TEACHER)}
        quiet = dataclasses.replace(microbatch)  # its layers' losses are reported nowhere
        with self._hidden_states.during(microbatch):
            with torch.no_grad():
                taught = self._teacher.family.forward(beside, theirs, quiet)
            learned = super().forward(model, own, microbatch)
        if isinstance(learned, VocabularyOutput):
            assert isinstance(taught, VocabularyOutput)
            return TaughtOutput(learned, taught)
        return {**learned, **{_TEACHER + name: tensor for name, tensor in taught.items()}}

    @override
    def loss(self, output: Any, microbatch: Microbatch) -> LossSum:
        """The mix of the family's first loss and the divergence, and its other losses as they are."""
        assert isinstance(output, TaughtOutput)
        return self.taught_loss(output.student, output.teacher.head(), microbatch)
