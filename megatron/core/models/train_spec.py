"""Model, data and loss: everything the shared training loop doesn't know about a model family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig
from megatron.config.pipeline import Stage
from megatron.config.run import RunConfig
from megatron.core.datasets.build import DatasetSplits
from megatron.core.datasets.samples import SampleDataset
from megatron.core.datasets.splits import SplitName, SplitSizes
from megatron.core.models.first_pass import FirstPass
from megatron.core.models.stage_inputs import hidden_stage_inputs, workload_of
from megatron.core.moe.layer import describe_metrics, expert_layers, layer_metrics
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.costs import Costs, Workload, costs_of
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.model_context import ModelContext
from megatron.core.pipeline_parallel.chunk import LossSum, Microbatch, StageInputs, TensorSpec
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.transformer.block import RecomputePlan


class TrainSpec(ABC):
    """What is trained: the base class of families' specs. A new one needs no change of loop, runner or optimizer.

    ``name``: in checkpoints. ``starts_from``: names of others whose trained models hold the body of this one's, each
    with prefixes of the parameters that they may lack; a train spec with any never starts from random weights.
    ``batch_fields``: every tensor of a batch that forward or loss may read, with the dimension in which it runs along
    the sequence: context-parallel ranks keep their slices of it. None: each rank needs all of it.
    ``ragged_fields``: those of which samples have different numbers of rows; see ``BatchLoader``.
    ``continues_texts``: whether it is a causal language model, which predicts each token from those before it.
    """

    name: str
    starts_from: Mapping[str, tuple[str, ...]] = {}
    batch_fields: Mapping[str, int | None]
    ragged_fields: frozenset[str] = frozenset()
    continues_texts: bool = False

    @abstractmethod
    def loss_names(self, run: RunConfig) -> tuple[str, ...]:
        """The losses, and other means such as accuracy, that ``loss`` reports: ranks without the last stage must know.

        A perplexity is reported for those whose last word is "loss", such as "lm loss".
        """

    def layer_metrics(self, run: RunConfig) -> Mapping[str, int]:
        """What layers report (``SideLosses.add_metric``) over all stages: how many numbers each has, by name.

        By default choices of experts and, where they are asked for, losses of each router.
        """
        moe = run.part(MoEConfig)
        if not moe.has_experts:
            return {}
        return layer_metrics(moe, expert_layers(moe, run.stacks, mtp_layers=run.model.mtp_num_layers))

    def describe_layer_metrics(
        self, run: RunConfig, layer_metrics: Mapping[str, Sequence[float]]
    ) -> tuple[str, Mapping[str, float]]:
        """A log line about the sums of ``layer_metrics`` over some steps, and numbers for curves: by default how evenly
        experts are used, and losses of layers.
        """
        return describe_metrics(run.part(MoEConfig), layer_metrics, ranks=run.parallel.expert_model_parallel_size)

    @abstractmethod
    def fields(self, run: RunConfig, stages: Sequence[Stage]) -> frozenset[str]:
        """Names of the tensors of a batch that a rank with these stages needs; none means that it reads no data."""

    def add_derived_fields(self, batch: Mapping[str, Tensor], run: RunConfig) -> Mapping[str, Tensor]:
        """Add fields computed from others, before the sequence is sliced; by default there are none."""
        return batch

    def stage_inputs(self, run: RunConfig, stage: Stage, context: ParallelContext) -> Mapping[str, TensorSpec]:
        """What the stage receives from the one before, for every microbatch; by default hidden states ``[s, b, h]``."""
        return hidden_stage_inputs(run, stage, context)

    @abstractmethod
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
        """The part of the model that ``stage`` names, all of it for None. ``groups``: settings, its family's own among
        them. ``seed``: of the initial weights; without it they are whatever memory holds.

        Planning builds every stage on torch's meta device, in a context without other processes: a constructor may
        neither read a tensor's values nor communicate.
        """

    @abstractmethod
    def forward(self, model: nn.Module, stage_inputs: StageInputs, microbatch: Microbatch) -> Any:
        """Run one part of the model: the next part's inputs, or the last part's output."""

    @abstractmethod
    def loss(self, output: Any, microbatch: Microbatch) -> LossSum:
        """Sum and count of each loss of one microbatch, from the last part's output."""

    @abstractmethod
    def counts(self, microbatch: Microbatch, context: ParallelContext) -> Mapping[str, Tensor]:
        """The counts that ``loss`` will find, from the data alone; empty on ranks without the last stage."""

    def look_ahead(
        self,
        microbatches: Sequence[Microbatch],
        forward: Callable[[Sequence[Microbatch]], Mapping[str, Tensor]],
    ) -> Sequence[Microbatch]:
        """This rank's microbatches of a global batch, with what their losses must know of all of it; by default as they
        are. Called before each step and for each batch of an evaluation; a collective.

        ``forward``: passes over microbatches without gradient and dropout; sum and count, ``[2]``, of each named loss
        over the global batch.
        """
        return microbatches

    @abstractmethod
    def build_datasets(self, run: RunConfig, tokenizer: Tokenizer, sizes: SplitSizes) -> DatasetSplits:
        """Training, validation and test data."""

    def before_training(self, first: FirstPass) -> Sequence[str]:
        """Do what needs the weights that a run starts from, before a sample is read; lines about it for the log.

        Every rank calls it once, also for a run that only evaluates. By default there is nothing to do.
        """
        return ()

    def state(self) -> Mapping[str, Any]:
        """What checkpoints keep for the run that goes on, as JSON; by default nothing."""
        return {}

    def files(self) -> Mapping[str, bytes]:
        """Files that checkpoints keep beside what ``state`` gives, by name; by default none."""
        return {}

    def samples(self, dataset: SampleDataset, split: SplitName, name: str = "") -> SampleDataset:
        """A data set of ``build_datasets`` with what else a loss reads of its samples. ``name``: among several of a
        split.
        """
        return dataset

    def workload(self, run: RunConfig, context: ParallelContext) -> Workload:
        """A microbatch of the run, which costs and attention requests of modules depend on; by default sequences of
        ``--seq-length`` tokens without padding.
        """
        return workload_of(run, context)

    def costs(self, model: nn.Module, workload: Workload) -> Costs:
        """Costs of a microbatch in a part of the model, and in what runs beside it."""
        return costs_of(model, workload)

    def beside(self, model: nn.Module) -> nn.Module | None:
        """A frozen model that runs beside a part of this one, which is neither trained nor saved; by default none."""
        return None

    def check_beside(self, run: RunConfig, tokenizer: Tokenizer) -> Sequence[str]:
        """What the run reads beside its data and its own checkpoint, a line each; raises MegatronError where that is
        missing or of another kind than the run needs.
        """
        return ()

    def load_beside(self, models: Sequence[nn.Module], mesh: Mesh) -> str | None:
        """Fill what runs beside a rank's ``models``; words for the log. A collective."""
        return None


@dataclass(frozen=True)
class ModelChunk:
    """A part of a train spec's model as the pipeline runner sees it. ``loss``: in place of the train spec's."""

    train_spec: TrainSpec
    model: nn.Module
    is_last: bool
    incoming: Mapping[str, TensorSpec] = field(default_factory=dict)
    loss: Callable[[Any, Microbatch], LossSum] | None = None

    def __call__(self, stage_inputs: StageInputs, microbatch: Microbatch) -> StageInputs | LossSum:
        """Forward, and the loss when this is the last part."""
        output = self.train_spec.forward(self.model, stage_inputs, microbatch)
        return (self.loss or self.train_spec.loss)(output, microbatch) if self.is_last else output
