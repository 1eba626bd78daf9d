"""GPT: next-token prediction on packed documents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from megatron.config.run import RunConfig
from megatron.core.datasets.gpt_dataset import DatasetSplits, build_gpt_splits
from megatron.core.datasets.splits import SplitSizes
from megatron.core.models.gpt import GPTModel
from megatron.core.models.stage import Stage, balanced_stages
from megatron.core.parallel.context import ParallelContext
from megatron.core.pipeline_parallel.chunk import LossSum, Microbatch, Wires
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.transformer.block import RecomputePlan
from megatron.core.transformer.heads import VocabularyOutput
from megatron.training.flops import gpt_flops_per_sample


class GPTRecipe:
    """A causal language model whose loss is the cross entropy of every unmasked token."""

    name = "gpt"
    batch_fields: Mapping[str, int | None] = {
        "tokens": 1,
        "labels": 1,
        "loss_mask": 1,
        "position_ids": 1,
        "segments": None,
    }

    def stages(self, run: RunConfig, num_stages: int) -> list[Stage]:
        """Layers divided evenly over the stages."""
        return balanced_stages(run.model.num_layers, num_stages)

    def build_model(self, run: RunConfig, stage: Stage, context: ParallelContext) -> GPTModel:
        """The stage's part of the GPT."""
        return GPTModel(run.model, context, stage=stage, recompute=recompute_plan(run), seed=run.training.seed)

    def forward(self, model: nn.Module, wires: Wires, microbatch: Microbatch) -> Any:
        """Tokens (or the previous stage's hidden states) through this stage."""
        output = model(
            microbatch.tensors["tokens"],
            microbatch.tensors.get("position_ids"),
            key=microbatch.key,
            segments=microbatch.tensors.get("segments"),
            hidden=wires.get("hidden"),
        )
        return output if isinstance(output, VocabularyOutput) else {"hidden": output}

    def loss(self, output: Any, microbatch: Microbatch) -> LossSum:
        """Cross entropy summed over the tokens that the loss mask keeps."""
        assert isinstance(output, VocabularyOutput)
        mask = microbatch.tensors["loss_mask"]
        return LossSum.single("lm loss", output.cross_entropy(microbatch.tensors["labels"], mask), mask.sum())

    def build_datasets(self, run: RunConfig, tokenizer: Tokenizer, sizes: SplitSizes) -> DatasetSplits:
        """Packed samples of ``--seq-length`` tokens from ``--data-path`` and its relatives."""
        return build_gpt_splits(
            run.data, seed=run.training.seed, sizes=sizes, tokenizer=tokenizer, vocab_size=run.model.vocab_size
        )

    def flops_per_sample(self, run: RunConfig) -> float:
        """Megatron's formula."""
        tensor_parallel = run.parallel.tensor_model_parallel_size
        return gpt_flops_per_sample(run.model, run.data.seq_length, tensor_model_parallel_size=tensor_parallel)


def recompute_plan(run: RunConfig) -> RecomputePlan:
    """Which activations ``--recompute-…`` asks to recompute."""
    training = run.training
    return RecomputePlan(
        granularity=training.recompute_granularity,
        method=training.recompute_method or "uniform",
        num_layers=training.recompute_num_layers or 1,
    )
