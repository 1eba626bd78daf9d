"""GPT: next-token prediction on packed documents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig
from megatron.config.pipeline import Stage
from megatron.config.run import RunConfig
from megatron.core.datasets.build import DatasetSplits
from megatron.core.datasets.samples import TEXT_LENGTH
from megatron.core.datasets.splits import SplitSizes
from megatron.core.models.gpt.data import build_gpt_splits
from megatron.core.models.gpt.layer_kinds import decoder_stack, layers_with_experts
from megatron.core.models.gpt.model import GPTModel
from megatron.core.models.gpt.multi_token import LABELS, MASK, TEXT, TOKENS, loss_name, shifted_fields, text_mask
from megatron.core.models.train_spec import TrainSpec
from megatron.core.moe.balancing import router_counts
from megatron.core.moe.layer import layer_metrics
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.model_context import ModelContext
from megatron.core.pipeline_parallel.chunk import LossSum, Microbatch, StageInputs
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.transformer.block import RecomputePlan
from megatron.core.transformer.output_layer import VocabularyOutput

TEXT_MASK = "text_mask"
"""A field of a batch with padding: which positions are text, ``[b, S]``."""


class GPTSpec(TrainSpec):
    """A causal language model whose loss is the cross entropy of every unmasked token, and with multi-token prediction
    that of future tokens.
    """

    name = "gpt"
    continues_texts = True
    batch_fields: Mapping[str, int | None] = {
        "tokens": 1,
        "labels": 1,
        "loss_mask": 1,
        "position_ids": 1,
        "document_ids": None,
        TEXT_MASK: 1,
        **dict.fromkeys((TOKENS, LABELS, MASK, TEXT), 2),
    }

    @override
    def loss_names(self, run: RunConfig) -> tuple[str, ...]:
        """Names of the losses: of the next token, of each depth of multi-token prediction, and of routers."""
        mtp = map(loss_name, range(run.model.mtp_num_layers))
        return ("lm loss", *mtp, *run.part(MoEConfig).loss_names)

    @override
    def layer_metrics(self, run: RunConfig) -> Mapping[str, int]:
        """Choices of experts and, where they are asked for, losses of each router, those of multi-token prediction
        among them.
        """
        moe = run.part(MoEConfig)
        return layer_metrics(moe, layers_with_experts(run.model, run.extra)) if moe.has_experts else {}

    @override
    def fields(self, run: RunConfig, stages: Sequence[Stage]) -> frozenset[str]:
        """Tokens for the embedding, labels for the loss; positions and documents wherever they matter, and where there
        may be padding for experts, which rows are text.
        """
        rotary, moe = run.model.is_rotary, run.part(MoEConfig)
        leaves_out, is_last = moe.leaves_padding_out, any(stage.is_last for stage in stages)
        has_mtp = run.model.mtp_num_layers > 0 and is_last
        needed = {
            "tokens": any(stage.is_first for stage in stages),
            "position_ids": run.data.reset_position_ids and (rotary or any(stage.is_first for stage in stages)),
            "document_ids": run.data.reset_attention_mask,
            **dict.fromkeys(("labels", "loss_mask"), is_last),
            **dict.fromkeys((TOKENS, LABELS, MASK), has_mtp),
            TEXT_MASK: leaves_out and run.data.may_pad,
            TEXT: leaves_out and has_mtp,
        }
        return frozenset(name for name, is_needed in needed.items() if is_needed)

    @override
    def add_derived_fields(self, batch: Mapping[str, Tensor], run: RunConfig) -> Mapping[str, Tensor]:
        """Add the tokens that multi-token prediction predicts and, where there is padding, which positions are text."""
        depths, found = run.model.mtp_num_layers, dict(batch)
        if batch and depths:
            found |= shifted_fields(batch, depths)
        if TEXT_LENGTH in batch and not (is_text := text_mask(batch)).all():
            found[TEXT_MASK] = is_text
        return found

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
        """The stage's part of the model."""
        stack, build = decoder_stack(model, groups), self.model_class(groups)
        return build(model, context, stage=stage, stack=stack, recompute=recompute, seed=seed)

    def model_class(self, groups: Sequence[object]) -> Callable[..., GPTModel]:
        """The class of the model; of a family around a GPT one with what ``groups`` say of its other parts."""
        return GPTModel

    @override
    def forward(self, model: nn.Module, stage_inputs: StageInputs, microbatch: Microbatch) -> Any:
        """Tokens (or the previous stage's hidden states) through this stage."""
        output = model(
            microbatch.tensors.get("tokens"),
            microbatch.tensors.get("position_ids"),
            rng_key=microbatch.rng_key,
            document_ids=microbatch.tensors.get("document_ids"),
            hidden=stage_inputs.get("hidden"),
            side_losses=microbatch.side_losses,
            future_tokens=microbatch.tensors.get(TOKENS),
            text_mask=microbatch.tensors.get(TEXT_MASK),
            future_text_mask=microbatch.tensors.get(TEXT),
            **self.more_inputs(microbatch),
        )
        return output if isinstance(output, VocabularyOutput) else {"hidden": output}

    def more_inputs(self, microbatch: Microbatch) -> Mapping[str, Any]:
        """What the model of a derived family reads of a batch, by argument of its ``forward``."""
        return {}

    @override
    def loss(self, output: Any, microbatch: Microbatch) -> LossSum:
        """Cross entropy summed over the tokens that the loss mask keeps, and over those of each future token."""
        assert isinstance(output, VocabularyOutput)
        tensors, scale = microbatch.tensors, microbatch.backward_scale
        mask = tensors["loss_mask"]
        parts = {"lm loss": (output.masked_cross_entropy(tensors["labels"], mask, backward_scale=scale), mask.sum())}
        for depth, future in enumerate(output.mtp):
            labels, mask = tensors[LABELS][:, depth], tensors[MASK][:, depth]
            parts[loss_name(depth)] = (future.masked_cross_entropy(labels, mask, backward_scale=scale), mask.sum())
        coefficients = {loss_name(depth): future.coefficient for depth, future in enumerate(output.mtp)}
        return LossSum.of(parts, weights=microbatch.loss_weights, coefficients=coefficients)

    @override
    def counts(self, microbatch: Microbatch, context: ParallelContext) -> dict[str, Tensor]:
        """Tokens that the loss mask keeps, and those of each future token; routers' losses are means over all text."""
        tensors = microbatch.tensors
        if "loss_mask" not in tensors:
            return {}
        mask, future = tensors["loss_mask"], tensors[MASK].sum((0, 2)) if MASK in tensors else ()
        found = {"lm loss": mask.sum()} | {loss_name(depth): count for depth, count in enumerate(future)}
        return found | router_counts(tensors.get(TEXT_MASK), mask)

    @override
    def build_datasets(self, run: RunConfig, tokenizer: Tokenizer, sizes: SplitSizes) -> DatasetSplits:
        """Packed samples of ``--seq-length`` tokens from ``--data-path`` and its relatives."""
        return build_gpt_splits(
            run.data, seed=run.training.seed, sizes=sizes, tokenizer=tokenizer, vocab_size=run.model.vocab_size
        )


TRAIN_SPEC: TrainSpec = GPTSpec()
