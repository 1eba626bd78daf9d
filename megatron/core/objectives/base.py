"""An objective: a train spec that is its family's but for what it replaces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from megatron.config.model import ModelConfig
from megatron.config.pipeline import Stage
from megatron.config.run import RunConfig
from megatron.core.datasets.build import DatasetSplits
from megatron.core.datasets.samples import SampleDataset
from megatron.core.datasets.splits import SplitName, SplitSizes
from megatron.core.models.first_pass import FirstPass
from megatron.core.models.train_spec import TrainSpec
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.costs import Costs, Workload
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.model_context import ModelContext
from megatron.core.pipeline_parallel.chunk import LossSum, Microbatch, StageInputs, TensorSpec
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.transformer.block import RecomputePlan


class Objective(TrainSpec):
    """What a model is trained for in place of its family's own loss: all that a subclass doesn't replace is the
    family's.

    The name is the family's, too: a checkpoint of such a run is one of the family, for any other command.
    """

    def __init__(self, family: TrainSpec) -> None:
        self.family = family
        self.name, self.starts_from, self.batch_fields = family.name, family.starts_from, family.batch_fields
        self.continues_texts = family.continues_texts

    @override
    def loss_names(self, run: RunConfig) -> tuple[str, ...]:
        return self.family.loss_names(run)

    @override
    def layer_metrics(self, run: RunConfig) -> Mapping[str, int]:
        return self.family.layer_metrics(run)

    @override
    def describe_layer_metrics(
        self, run: RunConfig, layer_metrics: Mapping[str, Sequence[float]]
    ) -> tuple[str, Mapping[str, float]]:
        return self.family.describe_layer_metrics(run, layer_metrics)

    @override
    def fields(self, run: RunConfig, stages: Sequence[Stage]) -> frozenset[str]:
        return self.family.fields(run, stages)

    @override
    def add_derived_fields(self, batch: Mapping[str, Tensor], run: RunConfig) -> Mapping[str, Tensor]:
        return self.family.add_derived_fields(batch, run)

    @override
    def stage_inputs(self, run: RunConfig, stage: Stage, context: ParallelContext) -> Mapping[str, TensorSpec]:
        return self.family.stage_inputs(run, stage, context)

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
        return self.family.build_model(model, groups, context, stage=stage, recompute=recompute, seed=seed)

    @override
    def forward(self, model: nn.Module, stage_inputs: StageInputs, microbatch: Microbatch) -> Any:
        return self.family.forward(model, stage_inputs, microbatch)

    @override
    def loss(self, output: Any, microbatch: Microbatch) -> LossSum:
        return self.family.loss(output, microbatch)

    @override
    def counts(self, microbatch: Microbatch, context: ParallelContext) -> Mapping[str, Tensor]:
        return self.family.counts(microbatch, context)

    @override
    def look_ahead(
        self,
        microbatches: Sequence[Microbatch],
        forward: Callable[[Sequence[Microbatch]], Mapping[str, Tensor]],
    ) -> Sequence[Microbatch]:
        return self.family.look_ahead(microbatches, forward)

    @override
    def build_datasets(self, run: RunConfig, tokenizer: Tokenizer, sizes: SplitSizes) -> DatasetSplits:
        return self.family.build_datasets(run, tokenizer, sizes)

    @override
    def before_training(self, first: FirstPass) -> Sequence[str]:
        return self.family.before_training(first)

    @override
    def state(self) -> Mapping[str, Any]:
        return self.family.state()

    @override
    def files(self) -> Mapping[str, bytes]:
        return self.family.files()

    @override
    def samples(self, dataset: SampleDataset, split: SplitName, name: str = "") -> SampleDataset:
        return self.family.samples(dataset, split, name)

    @override
    def workload(self, run: RunConfig, context: ParallelContext) -> Workload:
        return self.family.workload(run, context)

    @override
    def costs(self, model: nn.Module, workload: Workload) -> Costs:
        return self.family.costs(model, workload)

    @override
    def beside(self, model: nn.Module) -> nn.Module | None:
        return self.family.beside(model)

    @override
    def check_beside(self, run: RunConfig, tokenizer: Tokenizer) -> Sequence[str]:
        return self.family.check_beside(run, tokenizer)

    @override
    def load_beside(self, models: Sequence[nn.Module], mesh: Mesh) -> str | None:
        return self.family.load_beside(models, mesh)
