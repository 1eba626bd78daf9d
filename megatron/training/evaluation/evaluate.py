"""Evaluation: mean losses over a run's batches, and numbers for each of given samples, at any layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor

from megatron.config.run import RunConfig
from megatron.core.inference.scoring import Sample
from megatron.core.models.train_spec import ModelChunk
from megatron.core.parallel.collectives import all_reduce
from megatron.core.parallel.grid import Axis
from megatron.core.parallel.rng import StreamKey
from megatron.core.parallel.transport import Transport
from megatron.core.pipeline_parallel.chunk import LossSum, Microbatch
from megatron.core.pipeline_parallel.runner import Runner
from megatron.core.pipeline_parallel.settings import PipelineSettings
from megatron.core.transformer.output_layer import VocabularyOutput
from megatron.training.checkpoints.trained_model import PlacedModel
from megatron.training.evaluation.metrics import Metric
from megatron.training.loss_sums import GlobalLoss, global_loss, loss_sums
from megatron.training.run.data import held_slices
from megatron.training.run.pipeline import Plans, routes
from megatron.training.run.run import Run

AnyModel = TypeVar("AnyModel", bound=PlacedModel, covariant=True)


def evaluate(run: Run, batches: Iterator[list[Microbatch]]) -> GlobalLoss:
    """The mean losses over ``batches`` of this rank's microbatches, without dropout. A collective."""
    total: LossSum | None = None
    with run.evaluating(whole_weights=False):
        for batch in batches:
            microbatches = run.train_spec.look_ahead(batch, partial(_sums, run, axes=("dc", "pp", "dp", "cp")))
            loss = run.runner.step(run.plans.evaluation(len(microbatches)), microbatches)
            if loss is not None:
                total = loss if total is None else total.plus(loss)
    return global_loss(total, run.loss_names, run.context)


def look_ahead(run: Run, microbatches: Sequence[Microbatch]) -> Sequence[Microbatch]:
    """This rank's microbatches of a step with what their losses must know of the whole batch. A collective."""

    def forward(each: Sequence[Microbatch]) -> Mapping[str, Tensor]:
        with run.evaluating(whole_weights=False):
            return _sums(run, each, axes=("pp", "dp", "cp"))

    return run.train_spec.look_ahead(microbatches, forward)


def _sums(run: Run, microbatches: Sequence[Microbatch], *, axes: tuple[Axis, ...]) -> Mapping[str, Tensor]:
    """Sum and count of each named loss over the ranks of ``axes``, from a pass without gradient. A collective."""
    loss = run.runner.step(run.plans.evaluation(len(microbatches)), microbatches)
    return dict(zip(run.loss_names, loss_sums(loss, run.loss_names, run.context, axes=axes)[1:]))


class Evaluator(Generic[AnyModel]):
    """Computes metrics of samples with a trained causal language model. Its methods are collectives.

    The last stage computes a row of numbers for each sample. Rows are zero on other ranks, so their sum over the ranks
    is the whole table, on every rank.
    """

    def __init__(self, trained: AnyModel) -> None:
        self.trained = trained
        mesh, settings = trained.context.mesh, PipelineSettings.of(trained.config)
        self._plans = Plans(settings, mesh.rank("pp"))
        self._transport = Transport(mesh, trained.context.device, routes=routes(settings.placement))

    @torch.inference_mode()
    def evaluate(
        self,
        samples: Sequence[Sample],
        metric: Metric,
        *,
        progress: Callable[[int], None] = lambda samples_done: None,
    ) -> Tensor:
        """Rows ``[samples, width]`` in fp64, on the CPU of every rank.

        Samples of similar length form a batch, so that little is padding; each is evaluated once, by one data-parallel
        replica. ``progress`` is called with the number of samples done.
        """
        config, mesh = self.trained.config, self.trained.context.mesh
        order = sorted(range(len(samples)), key=lambda number: -samples[number].length)
        # Several microbatches keep a pipeline busy; without one, short steps need the least padding.
        replicas, count = mesh.size("dp"), 1 if mesh.size("pp") == 1 else 2 * mesh.size("pp")
        portion = count * replicas * config.training.micro_batch_size
        table = torch.zeros(len(samples), metric.width(config), dtype=torch.float64)
        for first in range(0, len(order), portion):
            step = order[first : first + portion]
            size = -(-len(step) // (count * replicas))  # the last step's samples are divided evenly, too
            mine = [
                step[start : start + size]
                for start in range(mesh.rank("dp") * size, count * replicas * size, replicas * size)
            ]
            batches = [[samples[number] for number in numbers] for numbers in mine]
            for number, rows in self._step(batches, samples[step[0]].length, size, metric).items():
                table[mine[number]] = rows[: len(mine[number])].cpu()
            progress(first + len(step))
        return all_reduce(table.to(self.trained.context.device), mesh, "pp", "dp", "cp").cpu()

    def _step(self, batches: Sequence[Sequence[Sample]], longest: int, size: int, metric: Metric) -> dict[int, Tensor]:
        """Rows ``[size, width]`` by number of the microbatch; none on ranks without the last stage."""
        trained, context, found = self.trained, self.trained.context, dict[int, Tensor]()
        # The shortest length from ``longest`` on that context- and sequence-parallel ranks can divide.
        unit = context.sequence_parts * (2 * context.mesh.size("cp") if context.mesh.size("cp") > 1 else 1)
        config = replace(
            trained.config,
            data=replace(trained.config.data, seq_length=-(-longest // unit) * unit),
            training=replace(trained.config.training, micro_batch_size=size),
        )

        def score(output: VocabularyOutput, microbatch: Microbatch) -> LossSum:
            labels, wanted = microbatch.tensors["labels"], microbatch.tensors["loss_mask"]
            rows = torch.zeros(labels.shape[0], metric.width(config), dtype=torch.float64, device=labels.device)
            metric(output, labels, wanted, rows)
            found[microbatch.rng_key.sample] = rows
            return LossSum(rows.new_zeros(()), rows.new_zeros(()))

        chunks = [
            ModelChunk(
                trained.train_spec, model, stage.is_last, trained.train_spec.stage_inputs(config, stage, context), score
            )
            for model, stage in zip(trained.models, trained.stages)
        ]
        runner = Runner(chunks, transport=self._transport, device=context.device, activity=context.mesh.activity)
        fields = trained.train_spec.fields(trained.config, trained.stages)
        microbatches = []
        for number, batch in enumerate(batches):
            needed = {name: tensor for name, tensor in _tensors(batch, config).items() if name in fields}
            held = held_slices(needed, trained.train_spec.batch_fields, context.mesh)
            on_device = {name: tensor.to(context.device) for name, tensor in held.items()}
            microbatches.append(Microbatch(on_device, StreamKey(number)))
        runner.step(self._plans.evaluation(len(microbatches)), microbatches)
        return found


def _tensors(samples: Sequence[Sample], config: RunConfig) -> dict[str, Tensor]:
    """A microbatch of the size and length of ``config``, padded on the right, which a causal model never sees."""
    tokens = torch.zeros(config.training.micro_batch_size, config.data.seq_length, dtype=torch.int64)
    labels, wanted = torch.zeros_like(tokens), torch.zeros_like(tokens, dtype=torch.bool)
    for row, sample in enumerate(samples):
        end = sample.length
        ids = torch.as_tensor(sample.tokens)
        tokens[row, :end], labels[row, :end] = ids[:-1], ids[1:]
        wanted[row, sample.first_scored : end] = True
    return {"tokens": tokens, "labels": labels, "loss_mask": wanted}
