"""Model, data and loss: everything the shared training loop doesn't know about a model family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from megatron.config.run import RunConfig
from megatron.core.datasets.build import DatasetSplits
from megatron.core.datasets.splits import SplitSizes
from megatron.core.models.stage import Stage
from megatron.core.parallel.context import ParallelContext
from megatron.core.pipeline_parallel.chunk import LossSum, Microbatch, Wires, WireSpec
from megatron.core.tokenizers.base import Tokenizer
from megatron.training.pipeline import PipelineSettings


class Recipe(Protocol):
    """One model family. Adding one is writing one of these; loop, runner and optimizer stay as they are.

    ``groups``: settings of this family alone, beside those of every run. ``starts_from``: other recipes whose trained
    models hold the body of this one's, by name, each with beginnings of the parameters that they may lack; a recipe
    with any never starts from nothing.
    ``batch_fields``: every tensor of a batch that may have a say in forward or loss, with the dimension in which it
    runs along the sequence: context-parallel ranks keep their slices of it. None: each rank needs all of it.
    """

    name: str
    groups: tuple[type, ...]
    starts_from: Mapping[str, tuple[str, ...]]
    batch_fields: Mapping[str, int | None]

    def loss_names(self, run: RunConfig) -> tuple[str, ...]:
        """The losses, and other means such as accuracy, that ``loss`` reports: ranks without the last stage must know.

        A perplexity is told of those whose names end in "loss".
        """
        ...

    def attention(self, run: RunConfig) -> Mapping[str, Mapping[str, Any]]:
        """What its layers ask of attention, as ``AttentionRequest`` calls it: ``causal``, masks, lengths other than
        ``--seq-length``; by name for layers of several kinds, which is empty for one.
        """
        ...

    def stages(self, run: RunConfig) -> list[Stage]:
        """The model cut into consecutive parts, as many as pipeline ranks and their chunks hold."""
        ...

    def fields(self, run: RunConfig, stages: Sequence[Stage]) -> frozenset[str]:
        """Names of the tensors of a batch that a rank with these stages needs; none means that it reads no data."""
        ...

    def wires(self, run: RunConfig, stage: Stage, context: ParallelContext) -> Mapping[str, WireSpec]:
        """What the stage is handed by the one before, for every microbatch."""
        ...

    def build_model(self, run: RunConfig, stage: Stage, context: ParallelContext) -> nn.Module:
        """The part of the model that ``stage`` names, with its initial weights."""
        ...

    def forward(self, model: nn.Module, wires: Wires, microbatch: Microbatch) -> Any:
        """Run one part of the model: hidden states for the next part as wires, or the last part's output."""
        ...

    def loss(self, output: Any, microbatch: Microbatch) -> LossSum:
        """Sum and count of each loss of one microbatch, from the last part's output."""
        ...

    def counts(self, microbatch: Microbatch, context: ParallelContext) -> Mapping[str, Tensor]:
        """The counts that ``loss`` will find, from the data alone; empty on ranks without the last stage."""
        ...

    def build_datasets(self, run: RunConfig, tokenizer: Tokenizer, sizes: SplitSizes) -> DatasetSplits:
        """Training, validation and test data."""
        ...

    def flops_per_sample(self, run: RunConfig) -> float:
        """Model FLOPs of one sample, forward and backward, without recomputation."""
        ...


def stages_here(run: RunConfig, recipe: Recipe, context: ParallelContext) -> list[Stage]:
    """The stages that this rank holds, by chunk."""
    stages = recipe.stages(run)
    placement = PipelineSettings.of(run).placement
    return [stages[number] for number in placement.stages_of(context.mesh.rank("pp"))]


@dataclass(frozen=True)
class ModelChunk:
    """A part of a recipe's model as the pipeline runner sees it."""

    recipe: Recipe
    model: nn.Module
    is_last: bool
    incoming: Mapping[str, WireSpec] = field(default_factory=dict)

    def __call__(self, wires: Wires, microbatch: Microbatch) -> Wires | LossSum:
        """Forward, and the loss when this is the last part."""
        output = self.recipe.forward(self.model, wires, microbatch)
        return self.recipe.loss(output, microbatch) if self.is_last else output
