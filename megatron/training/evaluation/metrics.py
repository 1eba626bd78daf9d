"""Metrics of a trained model on given samples, at any layout: a row of numbers for each, the same on every rank.

Samples go through the pipeline's runner like any evaluation. The last stage turns its output into a row of numbers
for each; rows are zero elsewhere, so one sum over the ranks gives all of them to all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from megatron.config.run import RunConfig
from megatron.core.checkpointing.find import CheckpointFolder, find_checkpoint
from megatron.core.checkpointing.load import load_checkpoint, read_run_state
from megatron.core.inference.scoring import Sample
from megatron.core.models.stage import Stage
from megatron.core.models.train_spec import TrainSpec
from megatron.core.parallel.collectives import all_reduce
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.rng import StreamKey
from megatron.core.parallel.transport import Transport
from megatron.core.pipeline_parallel.chunk import LossSum, Microbatch, StageInputs, TensorSpec
from megatron.core.pipeline_parallel.runner import Runner
from megatron.core.pipeline_parallel.settings import PipelineSettings
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.build import build_tokenizer
from megatron.core.transformer.output_layer import VocabularyOutput
from megatron.training.checkpoints.loading import check_same_model, where_to_find_weights
from megatron.training.checkpoints.trained_model import model_state, share_tied_parameters
from megatron.training.run.agreement import check_stages
from megatron.training.run.data import held_slices
from megatron.training.run.pipeline import Plans, routes
from megatron.training.run.stages import build_stage, stages_here


class Metric(Protocol):
    """Computes a row of numbers for each sample from a model's output."""

    def width(self, config: RunConfig) -> int:
        """How many a sequence."""
        ...

    def __call__(self, output: VocabularyOutput, labels: Tensor, wanted: Tensor, rows: Tensor) -> None:
        """Add to ``rows`` ``[b, width]`` what this rank's part of the sequences says.

        ``labels`` ``[b, s]``: the token after each. ``wanted`` ``[b, s]``: the positions that are asked about.
        """
        ...


@dataclass(frozen=True)
class Likelihoods:
    """Of the wanted labels: their negative log-likelihood in nats, how many another token beats, how many there are.

    ``compare``: whether the second is asked for; it is 0 else.
    """

    compare: bool

    def width(self, config: RunConfig) -> int:
        """Three."""
        return 3

    def __call__(self, output: VocabularyOutput, labels: Tensor, wanted: Tensor, rows: Tensor) -> None:
        """See the class."""
        here, targets, owners = output.where(wanted), labels[wanted], wanted.nonzero()[:, 0]
        columns = [here.token_losses(targets[None])[0].double(), torch.zeros_like(targets), torch.ones_like(targets)]
        if self.compare:
            columns[1] = here.most_likely()[0] != targets
        rows.index_add_(0, owners, torch.stack([column.double() for column in columns], dim=1))


@dataclass(frozen=True)
class Logits:
    """The logits at the one wanted position of each sequence."""

    def width(self, config: RunConfig) -> int:
        """One for each word of the vocabulary."""
        assert config.model.vocab_size is not None
        return config.model.vocab_size

    def __call__(self, output: VocabularyOutput, labels: Tensor, wanted: Tensor, rows: Tensor) -> None:
        """See the class."""
        rows.index_add_(0, wanted.nonzero()[:, 0], output.where(wanted).logits()[0].double())


@dataclass
class _MetricChunk:
    """A rank's part of the model; the last one notes rows down by the microbatch's number."""

    train_spec: TrainSpec
    model: nn.Module
    is_last: bool
    incoming: Mapping[str, TensorSpec]
    metric: Metric
    config: RunConfig
    found: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, stage_inputs: StageInputs, microbatch: Microbatch) -> StageInputs | LossSum:
        output: Any = self.train_spec.forward(self.model, stage_inputs, microbatch)
        if not self.is_last:
            return dict(output)
        labels, wanted = microbatch.tensors["labels"], microbatch.tensors["loss_mask"]
        rows = torch.zeros(labels.shape[0], self.metric.width(self.config), dtype=torch.float64, device=labels.device)
        self.metric(output, labels, wanted, rows)
        self.found[microbatch.rng_key.sample] = rows
        nothing = rows.new_zeros(())
        return LossSum(nothing, nothing)


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """This rank's parts of a trained causal language model, in evaluation mode, with its weights from ``folder``."""

    config: RunConfig
    train_spec: TrainSpec
    context: ParallelContext
    tokenizer: Tokenizer
    stages: list[Stage]
    models: list[nn.Module]
    folder: CheckpointFolder
    plans: Plans
    transport: Transport

    @torch.inference_mode()
    def evaluate(
        self,
        samples: Sequence[Sample],
        metric: Metric,
        *,
        progress: Callable[[int], None] = lambda samples_done: None,
    ) -> Tensor:
        """Rows ``[samples, width]`` in fp64, on the CPU of every rank. A collective.

        Samples are read with others of about their length, so that little is padding; each once, by one data-parallel
        replica. ``progress`` is told how many have been read.
        """
        mesh = self.context.mesh
        order = sorted(range(len(samples)), key=lambda number: -samples[number].length)
        # Several microbatches keep a pipeline busy; without one, short steps need the least padding.
        replicas, count = mesh.size("dp"), 1 if mesh.size("pp") == 1 else 2 * mesh.size("pp")
        portion = count * replicas * self.config.training.micro_batch_size
        table = torch.zeros(len(samples), metric.width(self.config), dtype=torch.float64)
        for first in range(0, len(order), portion):
            step = order[first : first + portion]
            size = -(-len(step) // (count * replicas))  # a rest is shared out, too
            mine = [
                step[start : start + size]
                for start in range(mesh.rank("dp") * size, count * replicas * size, replicas * size)
            ]
            batches = [[samples[number] for number in numbers] for numbers in mine]
            for number, rows in self._step(batches, samples[step[0]].length, size, metric).items():
                table[mine[number]] = rows[: len(mine[number])].cpu()
            progress(first + len(step))
        return all_reduce(table.to(self.context.device), mesh, "pp", "dp", "cp").cpu()

    def _step(self, batches: Sequence[Sequence[Sample]], longest: int, size: int, metric: Metric) -> dict[int, Tensor]:
        """Rows ``[size, width]`` by number of the microbatch; none on ranks without the last stage."""
        context = self.context
        config = replace(
            self.config,
            data=replace(self.config.data, seq_length=self._divisible(longest)),
            training=replace(self.config.training, micro_batch_size=size),
        )
        chunks = [
            _MetricChunk(
                self.train_spec,
                model,
                stage.is_last,
                self.train_spec.stage_inputs(config, stage, context),
                metric,
                config,
            )
            for model, stage in zip(self.models, self.stages)
        ]
        runner = Runner(chunks, transport=self.transport, device=context.device, activity=context.mesh.activity)
        microbatches = [
            Microbatch(self._held(_tensors(samples, config)), StreamKey(number))
            for number, samples in enumerate(batches)
        ]
        runner.step(self.plans.evaluation(len(microbatches)), microbatches)
        return {number: rows for chunk in chunks for number, rows in chunk.found.items()}

    def _held(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """What this rank needs of a microbatch, on its device."""
        fields = self.train_spec.fields(self.config, self.stages)
        needed = {name: tensor for name, tensor in batch.items() if name in fields}
        held = held_slices(needed, self.train_spec.batch_fields, self.context.mesh)
        return {name: tensor.to(self.context.device) for name, tensor in held.items()}

    def _divisible(self, length: int) -> int:
        """The shortest length from ``length`` on that context- and sequence-parallel ranks can divide between them."""
        mesh = self.context.mesh
        unit = mesh.size("tp") if self.context.sequence_parallel else 1
        unit *= 2 * mesh.size("cp") if mesh.size("cp") > 1 else 1
        return -(-length // unit) * unit


@dataclass(frozen=True)
class LogitsAtAnyLayout:
    """The plainest way to generate: the whole text through the model for every token, at the model's layout."""

    model: LoadedModel

    def __call__(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Logits ``[b, vocabulary]`` after the first ``lengths`` ``[b]`` of ``tokens`` ``[b, t]``. A collective."""
        ids = tokens.cpu().numpy()
        ends = lengths.tolist()
        # What is predicted is not known: any token will do in its place.
        samples = [Sample(np.append(ids[row, :end], 0), first_scored=end - 1) for row, end in enumerate(ends)]
        return self.model.evaluate(samples, Logits())


def _tensors(samples: Sequence[Sample], config: RunConfig) -> dict[str, Tensor]:
    """A microbatch of the size and length of ``config``, padded on the right, where a causal model never looks."""
    tokens = torch.zeros(config.training.micro_batch_size, config.data.seq_length, dtype=torch.int64)
    labels, wanted = torch.zeros_like(tokens), torch.zeros_like(tokens, dtype=torch.bool)
    for row, sample in enumerate(samples):
        end = sample.length
        ids = torch.as_tensor(sample.tokens)
        tokens[row, :end], labels[row, :end] = ids[:-1], ids[1:]
        wanted[row, sample.first_scored : end] = True
    return {"tokens": tokens, "labels": labels, "loss_mask": wanted}


def load_model(config: RunConfig, train_spec: TrainSpec, context: ParallelContext) -> LoadedModel:
    """The model that ``--load`` or ``--pretrained-checkpoint`` names, at the layout of ``config``. A collective.

    Raises CheckpointError when nothing usable is there or it is another model, ConfigError and DataError for a
    tokenizer that can't be built.
    """
    tokenizer = build_tokenizer(config.tokenizer)
    config = config.with_vocab_size(tokenizer.vocab_size)
    settings, mesh = config.checkpoint, context.mesh
    root = settings.load or settings.pretrained_checkpoint
    assert root is not None, "rules let no task begin without a checkpoint"
    if settings.load:
        folder = find_checkpoint(root, step=settings.ckpt_step, mesh=mesh)
    else:
        folder = find_checkpoint(root, mesh=mesh, flag="--pretrained-checkpoint")
    check_same_model(read_run_state(folder), folder, model_name=train_spec.name, config=config, tokenizer=tokenizer)
    stages = stages_here(config, train_spec, context)
    check_stages(config, stages, context)
    models = [build_stage(config, train_spec, stage, context).eval().requires_grad_(False) for stage in stages]
    share_tied_parameters(models)
    state = list(model_state(*models))
    load_checkpoint(folder, state, mesh, alternatives=where_to_find_weights(state))
    plans = Plans(PipelineSettings.of(config), mesh.rank("pp"))
    return LoadedModel(
        config=config,
        train_spec=train_spec,
        context=context,
        tokenizer=tokenizer,
        stages=stages,
        models=models,
        folder=folder,
        plans=plans,
        transport=Transport(mesh, context.device, routes=routes(plans.settings.placement)),
    )
