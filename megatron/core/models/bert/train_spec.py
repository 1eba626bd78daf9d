"""BERT: masked tokens and the order of two texts, on samples of sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from typing_extensions import override

from megatron.config.lora import LoraConfig
from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig
from megatron.config.pipeline import Stage
from megatron.config.run import RunConfig
from megatron.core.datasets.build import DatasetSplits
from megatron.core.datasets.splits import SplitSizes
from megatron.core.models.bert.config import BertConfig, TokenTypesConfig
from megatron.core.models.bert.data import build_bert_splits
from megatron.core.models.bert.model import BertModel, BertOutput
from megatron.core.models.stage_inputs import workload_of
from megatron.core.models.train_spec import TrainSpec
from megatron.core.moe.balancing import router_counts
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.costs import Workload
from megatron.core.parallel.model_context import ModelContext
from megatron.core.pipeline_parallel.chunk import LossSum, Microbatch, StageInputs
from megatron.core.tokenizers.base import MaskingTokenizer, Tokenizer
from megatron.core.transformer.block import RecomputePlan

WORDS, ORDER = "lm loss", "sop loss"
TEXT_MASK = "text_mask"
"""A field of a batch with experts: which tokens are text, and not padding."""


class BertSpec(TrainSpec):
    """A bidirectional language model whose loss is that of the masked tokens plus that of the texts' order, each a mean
    over its own count.
    """

    name = "bert"
    batch_fields: Mapping[str, int | None] = {
        "text": 1,
        "types": 1,
        "labels": 1,
        "loss_mask": 1,
        "attention_mask": None,
        "is_random": None,
        TEXT_MASK: 1,
    }

    @override
    def loss_names(self, run: RunConfig) -> tuple[str, ...]:
        """The order of texts only with a head for it; and the losses of routers."""
        main = (WORDS, ORDER) if run.group(BertConfig).bert_binary_head else (WORDS,)
        return (*main, *run.part(MoEConfig).loss_names)

    @override
    def fields(self, run: RunConfig, stages: Sequence[Stage]) -> frozenset[str]:
        """Tokens and types for the embedding, labels for the losses, and what is padding for every layer."""
        found = {"attention_mask"} | ({TEXT_MASK} if run.part(MoEConfig).leaves_padding_out else set())
        if any(stage.is_first for stage in stages):
            found |= {"text", "types"}
        if any(stage.is_last for stage in stages):
            found |= {"labels", "loss_mask"} | ({"is_random"} if run.group(BertConfig).bert_binary_head else set())
        return frozenset(found)

    @override
    def add_derived_fields(self, batch: Mapping[str, Tensor], run: RunConfig) -> Mapping[str, Tensor]:
        """Add which tokens are sent to experts: all but padding."""
        return with_text_mask(batch, run)

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
        """The stage's part of the BERT."""
        group = BertConfig.among(groups)
        return BertModel(
            model,
            context,
            stage=stage,
            binary_head=group.bert_binary_head,
            exact_gelu_head=group.exact_gelu_head,
            head_bias=group.head_bias,
            token_types=TokenTypesConfig.among(groups).num_tokentypes,
            moe=MoEConfig.among(groups),
            lora=LoraConfig.among(groups),
            recompute=recompute,
            seed=seed,
        )

    @override
    def forward(self, model: nn.Module, stage_inputs: StageInputs, microbatch: Microbatch) -> Any:
        """Tokens (or the previous stage's hidden states) through this stage."""
        return run_bert(model, stage_inputs, microbatch)

    @override
    def loss(self, output: Any, microbatch: Microbatch) -> LossSum:
        """Cross entropy summed over masked tokens, and over the samples whose texts have an order."""
        assert isinstance(output, BertOutput)
        tensors, context = microbatch.tensors, output.words.context
        counts = self.counts(microbatch, context)
        words = output.words.cross_entropy_where_weighted(
            tensors["labels"], tensors["loss_mask"], backward_scale=microbatch.backward_scale
        )
        parts = {WORDS: (words, counts[WORDS])}
        if output.order is not None:
            order, exchanged = output.order, tensors["is_random"]
            wide = order.to(torch.promote_types(order.dtype, torch.float32))
            losses = cross_entropy(wide, exchanged.clamp(min=0), reduction="none")
            parts[ORDER] = ((losses * _has_order(exchanged, context)).sum(), counts[ORDER])
        return LossSum.of(parts, weights=microbatch.loss_weights)

    @override
    def counts(self, microbatch: Microbatch, context: ParallelContext) -> dict[str, Tensor]:
        """Masked tokens, samples whose order counts, and the tokens that routers' losses are means over."""
        tensors = microbatch.tensors
        found = {}
        if "loss_mask" in tensors:
            found = {WORDS: tensors["loss_mask"].sum()} | router_counts(tensors.get(TEXT_MASK), tensors["loss_mask"])
        return found | ({ORDER: _has_order(tensors["is_random"], context).sum()} if "is_random" in tensors else {})

    @override
    def build_datasets(self, run: RunConfig, tokenizer: Tokenizer, sizes: SplitSizes) -> DatasetSplits:
        """Samples of sentences from ``--data-path`` and its relatives."""
        bert = run.group(BertConfig)
        return build_bert_splits(
            run.data,
            seed=run.training.seed,
            sizes=sizes,
            tokenizer=cast("MaskingTokenizer", tokenizer),  # a kind that can't mask is refused with its name
            vocab_size=run.model.vocab_size,
            binary_head=bert.bert_binary_head,
            mask_probability=bert.mask_prob,
            short_probability=bert.short_seq_prob,
        )

    @override
    def workload(self, run: RunConfig, context: ParallelContext) -> Workload:
        """Texts with padding, whose masked tokens are predicted."""
        return workload_of(run, context, has_padding=True, predicted=run.group(BertConfig).mask_prob)


def _has_order(exchanged: Tensor, context: ParallelContext) -> Tensor:
    """Samples ``[b]`` whose texts' order counts, on the context-parallel rank that has their first token."""
    return exchanged >= 0 if context.mesh.rank("cp") == 0 else torch.zeros_like(exchanged, dtype=torch.bool)


def with_text_mask(batch: Mapping[str, Tensor], run: RunConfig) -> Mapping[str, Tensor]:
    """The batch of a BERT, whatever its head, with the tokens that are sent to experts: all but padding."""
    if not batch or not run.part(MoEConfig).leaves_padding_out:
        return batch
    return {**batch, TEXT_MASK: batch["attention_mask"].bool()}


def run_bert(model: nn.Module, stage_inputs: StageInputs, microbatch: Microbatch) -> Any:
    """Tokens of sentences (or the previous stage's hidden states) through a stage of a BERT, whatever its head."""
    tensors = microbatch.tensors
    output = model(
        tensors.get("text"),
        tensors.get("types"),
        attention_mask=tensors["attention_mask"].bool(),
        rng_key=microbatch.rng_key,
        hidden=stage_inputs.get("hidden"),
        side_losses=microbatch.side_losses,
        text_mask=tensors.get(TEXT_MASK),
    )
    return {"hidden": output} if isinstance(output, Tensor) else output


TRAIN_SPEC: TrainSpec = BertSpec()
