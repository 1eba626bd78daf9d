"""The train spec of an XLNet: batches of segments, stages, and the loss of the predicted tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from megatron.config.model import ModelConfig
from megatron.config.pipeline import Stage
from megatron.config.run import RunConfig
from megatron.core.datasets.build import DatasetSplits, build_splits
from megatron.core.datasets.splits import SplitSizes
from megatron.core.models.stage_inputs import hidden_spec, workload_of
from megatron.core.models.train_spec import TrainSpec
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.costs import Workload
from megatron.core.parallel.model_context import ModelContext
from megatron.core.pipeline_parallel.chunk import LossSum, Microbatch, StageInputs, TensorSpec
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.transformer.output_layer import VocabularyOutput
from xlnet.config import XLNetConfig
from xlnet.data import SegmentDatasets
from xlnet.model import XLNetModel

LOSS = "lm loss"


class XLNetSpec(TrainSpec):
    """A permutation language model whose loss is the cross entropy of the last tokens of each factorization order."""

    name = "xlnet"
    batch_fields: Mapping[str, int | None] = dict.fromkeys(
        ("tokens", "documents", "ranks", "places", "labels", "loss_mask")
    )

    @override
    def loss_names(self, run: RunConfig) -> tuple[str, ...]:
        """Name of the one loss."""
        return (LOSS,)

    @override
    def fields(self, run: RunConfig, stages: Sequence[Stage]) -> frozenset[str]:
        """Tokens for the embedding, labels for the loss; orders, places and documents for every layer."""
        found = {"documents", "ranks", "places"}
        found |= {"tokens"} if any(stage.is_first for stage in stages) else set()
        return frozenset(found | ({"labels", "loss_mask"} if any(stage.is_last for stage in stages) else set()))

    @override
    def stage_inputs(self, run: RunConfig, stage: Stage, context: ParallelContext) -> Mapping[str, TensorSpec]:
        """Hidden states of both streams."""
        own = run.group(XLNetConfig)
        rows, sequences = run.data.seq_length + own.num_predict, own.segments_per_sample
        return {} if stage.is_first else {"hidden": hidden_spec(run, context, length=rows, sequences=sequences)}

    @override
    def build_model(
        self, model: ModelConfig, groups: Sequence[object], context: ModelContext, **part: Any
    ) -> nn.Module:
        """Build the model, or one stage of it; ``part``: see ``XLNetModel``."""
        return XLNetModel(model, XLNetConfig.among(groups), context, **part)

    @override
    def forward(self, model: nn.Module, stage_inputs: StageInputs, microbatch: Microbatch) -> Any:
        """Tokens (or the previous stage's hidden states) through this stage."""
        tensors = microbatch.tensors
        output = model(
            tensors.get("tokens"),
            ranks=tensors["ranks"],
            places=tensors["places"],
            documents=tensors["documents"],
            rng_key=microbatch.rng_key,
            hidden=stage_inputs.get("hidden"),
            side_losses=microbatch.side_losses,
        )
        return output if isinstance(output, VocabularyOutput) else {"hidden": output}

    @override
    def loss(self, output: Any, microbatch: Microbatch) -> LossSum:
        """Cross entropy summed over the predicted tokens."""
        assert isinstance(output, VocabularyOutput)
        labels, mask = (microbatch.tensors[name].flatten(0, 1) for name in ("labels", "loss_mask"))
        total = output.cross_entropy(labels, mask, backward_scale=microbatch.backward_scale)
        return LossSum.single(LOSS, total, mask.sum())

    @override
    def counts(self, microbatch: Microbatch, context: ParallelContext) -> Mapping[str, Tensor]:
        """The predicted tokens."""
        tensors = microbatch.tensors
        return {LOSS: tensors["loss_mask"].sum()} if "loss_mask" in tensors else {}

    @override
    def build_datasets(self, run: RunConfig, tokenizer: Tokenizer, sizes: SplitSizes) -> DatasetSplits:
        """Segments of the documents of ``--data-path`` and its relatives."""
        assert run.model.vocab_size is not None
        datasets = SegmentDatasets(run, tokenizer)
        return build_splits(run.data, datasets, sizes=sizes, tokenizer=tokenizer, vocab_size=run.model.vocab_size)

    @override
    def workload(self, run: RunConfig, context: ParallelContext) -> Workload:
        """The rows of both streams, of which those of the query stream are predicted."""
        own = run.group(XLNetConfig)
        rows = run.data.seq_length + own.num_predict
        usual = workload_of(run, context, sequences=own.segments_per_sample, predicted=own.num_predict / rows)
        return dataclasses.replace(usual, length=rows)


TRAIN_SPEC: TrainSpec = XLNetSpec()
