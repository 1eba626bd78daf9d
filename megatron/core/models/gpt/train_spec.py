"""GPT: next-token prediction on packed documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.config.run import RunConfig
from megatron.core.datasets.build import DatasetSplits
from megatron.core.datasets.splits import SplitSizes
from megatron.core.models.gpt.data import build_gpt_splits
from megatron.core.models.gpt.model import GPTModel
from megatron.core.models.stage import Stage
from megatron.core.models.train_spec import TrainSpec
from megatron.core.parallel.context import ParallelContext
from megatron.core.pipeline_parallel.chunk import LossSum, Microbatch, StageInputs
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.transformer.block import RecomputePlan
from megatron.core.transformer.output_layer import VocabularyOutput


class GPTSpec(TrainSpec):
    """A causal language model whose loss is the cross entropy of every unmasked token."""

    name = "gpt"
    batch_fields: Mapping[str, int | None] = {
        "tokens": 1,
        "labels": 1,
        "loss_mask": 1,
        "position_ids": 1,
        "document_ids": None,
    }

    def loss_names(self, run: RunConfig) -> tuple[str, ...]:
        """One."""
        return ("lm loss",)

    def fields(self, run: RunConfig, stages: Sequence[Stage]) -> frozenset[str]:
        """Tokens for the embedding, labels for the loss; positions and documents wherever they matter."""
        rotary = run.model.position_embedding_type == "rope"
        needed = {
            "tokens": any(stage.is_first for stage in stages),
            "position_ids": run.data.reset_position_ids and (rotary or any(stage.is_first for stage in stages)),
            "document_ids": run.data.reset_attention_mask,
            "labels": any(stage.is_last for stage in stages),
            "loss_mask": any(stage.is_last for stage in stages),
        }
        return frozenset(name for name, is_needed in needed.items() if is_needed)

    def build_model(
        self,
        model: ModelConfig,
        groups: Sequence[object],
        context: ParallelContext,
        *,
        stage: Stage | None = None,
        recompute: RecomputePlan | None = None,
        seed: int | None = None,
    ) -> nn.Module:
        """The stage's part of the GPT."""
        return GPTModel(model, context, stage=stage, recompute=recompute, seed=seed)

    def forward(self, model: nn.Module, stage_inputs: StageInputs, microbatch: Microbatch) -> Any:
        """Tokens (or the previous stage's hidden states) through this stage."""
        output = model(
            microbatch.tensors.get("tokens"),
            microbatch.tensors.get("position_ids"),
            rng_key=microbatch.rng_key,
            document_ids=microbatch.tensors.get("document_ids"),
            hidden=stage_inputs.get("hidden"),
            side_losses=microbatch.side_losses,
        )
        return output if isinstance(output, VocabularyOutput) else {"hidden": output}

    def loss(self, output: Any, microbatch: Microbatch) -> LossSum:
        """Cross entropy summed over the tokens that the loss mask keeps."""
        assert isinstance(output, VocabularyOutput)
        mask = microbatch.tensors["loss_mask"]
        total = output.cross_entropy(microbatch.tensors["labels"], mask, backward_scale=microbatch.backward_scale)
        return LossSum.single("lm loss", total, mask.sum())

    def counts(self, microbatch: Microbatch, context: ParallelContext) -> dict[str, Tensor]:
        """Tokens that the loss mask keeps."""
        tensors = microbatch.tensors
        return {"lm loss": tensors["loss_mask"].sum()} if "loss_mask" in tensors else {}

    def build_datasets(self, run: RunConfig, tokenizer: Tokenizer, sizes: SplitSizes) -> DatasetSplits:
        """Packed samples of ``--seq-length`` tokens from ``--data-path`` and its relatives."""
        return build_gpt_splits(
            run.data, seed=run.training.seed, sizes=sizes, tokenizer=tokenizer, vocab_size=run.model.vocab_size
        )


TRAIN_SPEC: TrainSpec = GPTSpec()
