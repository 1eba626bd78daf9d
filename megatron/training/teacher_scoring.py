"""Scoring: the teacher of a run reads the run's samples once, and its distributions are stored. At any layout."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.distillation import DistillationConfig
from megatron.config.flags import flags_of
from megatron.config.parallel import ParallelConfig
from megatron.config.pipeline import Stage
from megatron.config.run import RunConfig
from megatron.core.checkpointing.agreement import run_on_first
from megatron.core.datasets.build import DatasetSplits
from megatron.core.datasets.samples import SampleDataset
from megatron.core.datasets.splits import SPLITS, SplitName, SplitSizes
from megatron.core.datasets.teacher_scores import (
    NUMBER,
    PLACES,
    SEEN,
    NumberedSamples,
    ScoresHeader,
    ScoreWriter,
    data_name,
    make_files,
)
from megatron.core.models.train_spec import ModelChunk, TrainSpec
from megatron.core.objectives.base import Objective
from megatron.core.parallel.collectives import barrier
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.transport import Transport
from megatron.core.pipeline_parallel.chunk import LossSum, Microbatch
from megatron.core.pipeline_parallel.runner import Runner
from megatron.core.pipeline_parallel.settings import PipelineSettings
from megatron.core.tensor_parallel.distillation import TopOfDistribution
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.build import build_tokenizer
from megatron.core.transformer.output_layer import VocabularyOutput
from megatron.errors import ConfigError
from megatron.planning.stages import with_stages
from megatron.training.distillation import teacher_of
from megatron.training.run.data import TrainingData
from megatron.training.run.pipeline import Plans, routes
from megatron.training.run.split_sizes import split_sizes
from megatron.training.run.stages import build_stages, model_state


class _Scoring(Objective):
    """A teacher whose samples, those of the student's family, have numbers, digests and places; its loss stores what it
    finds.
    """

    def __init__(self, family: TrainSpec, student: TrainSpec, *, top_k: int, temperature: float) -> None:
        super().__init__(family)
        self._student = student
        self._top_k, self._temperature = top_k, temperature
        self.batch_fields = {**family.batch_fields, NUMBER: None, SEEN: None, PLACES: 1}
        self.writer: ScoreWriter | None = None

    @override
    def fields(self, run: RunConfig, stages: Sequence[Stage]) -> frozenset[str]:
        """The family's, and what says where a distribution is stored."""
        more = (NUMBER, SEEN, PLACES) if any(stage.is_last for stage in stages) else ()
        return super().fields(run, stages) | frozenset(more)

    @override
    def build_datasets(self, run: RunConfig, tokenizer: Tokenizer, sizes: SplitSizes) -> DatasetSplits:
        """The student's data."""
        return self._student.build_datasets(run, tokenizer, sizes)

    @override
    def samples(self, dataset: SampleDataset, split: SplitName, name: str = "") -> SampleDataset:
        """Samples with their numbers."""
        return NumberedSamples(super().samples(dataset, split, name))

    @override
    def loss(self, output: Any, microbatch: Microbatch) -> LossSum:
        """Store the top of each token's distribution, on one of the ranks that know it; nothing is trained."""
        assert isinstance(output, VocabularyOutput) and self.writer is not None
        top = output.top(self._top_k, temperature=self._temperature)
        if output.context.mesh.rank("tp") == 0:
            _store(self.writer, top, microbatch)
        nothing = torch.zeros((), device=output.hidden.device)
        return LossSum(nothing, nothing)


def _store(writer: ScoreWriter, top: TopOfDistribution, microbatch: Microbatch) -> None:
    numbers, digests, places = (microbatch.tensors[name].cpu() for name in (NUMBER, SEEN, PLACES))
    length, batch = places.shape[1], len(numbers)
    ids, logs, rest = (
        each.view(length, batch, *each.shape[1:]).transpose(0, 1).cpu() for each in (top.ids, top.log_probs, top.rest)
    )
    lowest = torch.finfo(getattr(torch, writer.header.log_probs)).min
    for row, (number, digest) in enumerate(zip(numbers.flatten().tolist(), digests.flatten().tolist())):
        if number >= 0:
            kept = (each[row].clamp(min=lowest).numpy() for each in (logs, rest))
            writer.store(number, digest % (1 << 64), places[row].numpy(), ids[row].int().numpy(), *kept)


def score(
    config: RunConfig,
    family: TrainSpec,
    context: ParallelContext,
    folder: Path,
    *,
    top_k: int,
    log_probs: str,
    say: Callable[[str], None],
) -> ScoresHeader:
    """Store the distributions of the teacher of ``config`` over all samples that such a run reads. A collective.

    ``family``: the student's. ``log_probs``: type of what is stored.

    Raises ConfigError for more ids than there are, and as ``teacher_of`` and ``check_beside``.
    """
    tokenizer = build_tokenizer(config.tokenizer)
    config = config.with_vocab_size(tokenizer.vocab_size)
    vocabulary = config.model.vocab_size or 0
    if top_k > vocabulary:
        raise ConfigError(f"--top-k {top_k:,} is more than the vocabulary of {vocabulary:,}; give at most that many")
    teacher = teacher_of(config)
    teacher.source.check(config, tokenizer)
    settings = config.part(DistillationConfig)
    run = with_stages(_run_of_teacher(teacher.run(config)), teacher.family)
    spec = _Scoring(teacher.family, family, top_k=top_k, temperature=settings.temperature)
    data = TrainingData(run, spec, context, tokenizer)
    wanted = split_sizes(run)
    sizes = {
        (split, name): min(count, wanted.of(split) or count)
        for split in SPLITS
        for name, count in data.sizes(split).items()
    }
    header = ScoresHeader(
        teacher=settings.teacher[0],
        fingerprint=fingerprint(Path(settings.teacher[0])),
        tokenizer=tokenizer.fingerprint,
        vocab_size=vocabulary,
        seq_length=run.data.seq_length,
        top_k=top_k,
        temperature=settings.temperature,
        log_probs=log_probs,
        samples={data_name(*each): count for each, count in sizes.items()},
    )
    run_on_first(lambda: make_files(folder, header), context.mesh)
    read = _Reader(run, spec, context)
    teacher.source.fill(list(model_state(*read.models)), context.mesh)
    for (split, name), count in sizes.items():
        say(f"scoring {count:,} samples of {data_name(split, name)}")
        spec.writer = ScoreWriter(folder, header, data_name(split, name))
        read.all(data.every_sample(split, samples=count, name=name))
        spec.writer.close()
    barrier(context.mesh)
    if context.mesh.world_rank == 0:
        header.write(folder)
    return header


def _run_of_teacher(run: RunConfig) -> RunConfig:
    """The run of a teacher that is cut into even stages, whatever the flags say of the student's."""
    kept = ("pipeline_model_parallel_size", "use_tp_pp_dp_mapping")
    own = {
        spec.field: spec.default
        for spec in flags_of(ParallelConfig)
        if "pipeline" in spec.field and spec.field not in kept
    }
    parallel = dataclasses.replace(run.parallel, **own)
    return dataclasses.replace(run, parallel=parallel, checkpoint=CheckpointConfig())


class _Reader:
    """The teacher on this rank, forward only."""

    def __init__(self, run: RunConfig, spec: _Scoring, context: ParallelContext) -> None:
        on = ModelContext.plain(context)
        stages, self.models = build_stages(run, spec, on)
        self._plans = Plans(PipelineSettings.of(run), context.mesh.rank("pp"))
        for model in self.models:
            model.eval().requires_grad_(requires_grad=False)
        self._runner = Runner(
            [
                ModelChunk(spec, model, stage.is_last, spec.stage_inputs(run, stage, context))
                for model, stage in zip(self.models, stages)
            ],
            transport=Transport(context.mesh, context.device, routes=routes(self._plans.settings.placement)),
            device=context.device,
            activity=context.mesh.activity,
        )
        self._together = max(1, run.parallel.pipeline_model_parallel_size) * 2

    def all(self, microbatches: Any) -> None:
        """Read all microbatches, some at a time so that stages work at once."""
        batch = list[Microbatch]()
        for each in microbatches:
            batch.append(each)
            if len(batch) == self._together:
                self._runner.step(self._plans.evaluation(len(batch)), batch)
                batch = []
        if batch:
            self._runner.step(self._plans.evaluation(len(batch)), batch)


def fingerprint(place: Path) -> str:
    """A digest of the names and sizes of the files of a model, and of the small ones' bytes."""
    found = hashlib.sha256()
    for path in sorted(path for path in place.rglob("*") if path.is_file()):
        size = path.stat().st_size
        found.update(f"{path.relative_to(place)} {size}\n".encode())
        if size < 1 << 20:
            found.update(path.read_bytes())
    return found.hexdigest()
