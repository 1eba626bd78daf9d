"""T5: a decoder that attends to an encoder predicts masked spans, on samples of sentences."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn
from typing_extensions import override

from megatron.config.lora import LoraConfig
from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig
from megatron.config.pipeline import Stage
from megatron.config.run import RunConfig
from megatron.core.datasets.build import DatasetSplits
from megatron.core.datasets.splits import SplitSizes
from megatron.core.models.stage_inputs import hidden_spec, workload_of
from megatron.core.models.t5.config import T5Config
from megatron.core.models.t5.data import build_t5_splits
from megatron.core.models.t5.layers import EncoderDecoderLayers
from megatron.core.models.t5.model import DECODER, T5Model
from megatron.core.models.train_spec import TrainSpec
from megatron.core.moe.balancing import router_counts
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.costs import Workload
from megatron.core.parallel.model_context import ModelContext
from megatron.core.pipeline_parallel.chunk import LossSum, Microbatch, StageInputs, TensorSpec
from megatron.core.tokenizers.base import SpanTokenizer, Tokenizer
from megatron.core.transformer.block import RecomputePlan
from megatron.core.transformer.output_layer import VocabularyOutput

ENCODER_TEXT, DECODER_TEXT = "encoder_text_mask", "decoder_text_mask"
"""Fields of a batch with experts: which tokens of each stack are text, and not padding."""


class T5Spec(TrainSpec):
    """An encoder and a decoder whose loss is the cross entropy of every target token of the decoder."""

    name = "t5"
    batch_fields: Mapping[str, int | None] = {
        "text_enc": 1,
        "text_dec": 1,
        "labels": 1,
        "loss_mask": 1,
        "enc_mask": None,
        ENCODER_TEXT: 1,
        DECODER_TEXT: 1,
    }

    @override
    def loss_names(self, run: RunConfig) -> tuple[str, ...]:
        """Name of the main loss, and of those of routers in each stack, which are means over its own tokens."""
        routers = run.part(MoEConfig).loss_names
        return ("lm loss", *routers, *(DECODER + name for name in routers))

    @override
    def fields(self, run: RunConfig, stages: Sequence[Stage]) -> frozenset[str]:
        """Tokens for both embeddings, labels for the loss, and what is padding for every layer."""
        found = {"enc_mask"} | ({ENCODER_TEXT, DECODER_TEXT} if run.part(MoEConfig).leaves_padding_out else set())
        if any(stage.is_first for stage in stages):
            found.add("text_enc")
        if any(EncoderDecoderLayers.of(stage.layers, run.model.num_layers).opens_decoder for stage in stages):
            found.add("text_dec")
        if any(stage.is_last for stage in stages):
            found |= {"labels", "loss_mask"}
        return frozenset(found)

    @override
    def add_derived_fields(self, batch: Mapping[str, Tensor], run: RunConfig) -> Mapping[str, Tensor]:
        """Add which tokens of each stack are sent to experts: all but padding."""
        if not batch or not run.part(MoEConfig).leaves_padding_out:
            return batch
        return {**batch, ENCODER_TEXT: batch["enc_mask"].bool(), DECODER_TEXT: batch["dec_mask"].bool()}

    @override
    def stage_inputs(self, run: RunConfig, stage: Stage, context: ParallelContext) -> dict[str, TensorSpec]:
        """Hidden states ``[s, b, h]``; of the decoder together with the encoder's output."""
        if stage.is_first:
            return {}
        length, decoder_length = run.data.seq_length, run.group(T5Config).decoder_seq_length
        from_encoder = hidden_spec(run, context, length=length, normed=True)
        if stage.layers.start > run.model.num_layers:
            return {
                "hidden": hidden_spec(run, context, length=decoder_length),
                "encoder_hidden_states": from_encoder,
            }
        whole = stage.layers.start == run.model.num_layers
        return {"hidden": from_encoder if whole else hidden_spec(run, context, length=length)}

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
        """The stage's part of the T5."""
        return T5Model(
            model,
            T5Config.among(groups),
            context,
            moe=MoEConfig.among(groups),
            lora=LoraConfig.among(groups),
            stage=stage,
            recompute=recompute,
            seed=seed,
        )

    @override
    def forward(self, model: nn.Module, stage_inputs: StageInputs, microbatch: Microbatch) -> Any:
        """Tokens, or the previous stage's hidden states, through this stage."""
        tensors = microbatch.tensors
        return model(
            tensors.get("text_enc"),
            tensors.get("text_dec"),
            attention_mask=tensors["enc_mask"].bool(),
            rng_key=microbatch.rng_key,
            hidden=stage_inputs.get("hidden"),
            encoder_hidden_states=stage_inputs.get("encoder_hidden_states"),
            side_losses=microbatch.side_losses,
            encoder_text_mask=tensors.get(ENCODER_TEXT),
            decoder_text_mask=tensors.get(DECODER_TEXT),
        )

    @override
    def loss(self, output: Any, microbatch: Microbatch) -> LossSum:
        """Cross entropy summed over the decoder's target tokens."""
        assert isinstance(output, VocabularyOutput)
        labels, mask = microbatch.tensors["labels"], microbatch.tensors["loss_mask"]
        total = output.masked_cross_entropy(labels, mask, backward_scale=microbatch.backward_scale)
        return LossSum.single("lm loss", total, mask.sum())

    @override
    def counts(self, microbatch: Microbatch, context: ParallelContext) -> dict[str, Tensor]:
        """The decoder's target tokens, and the tokens of each stack that routers' losses are means over."""
        tensors = microbatch.tensors
        if "loss_mask" not in tensors:
            return {}
        mask, encoder = tensors["loss_mask"], tensors["enc_mask"]
        encoder = encoder[:, : encoder.shape[1] // context.mesh.size("cp")]
        routers = router_counts(tensors.get(ENCODER_TEXT), encoder)
        routers |= router_counts(tensors.get(DECODER_TEXT), mask, stack=DECODER)
        return {"lm loss": mask.sum()} | routers

    @override
    def build_datasets(self, run: RunConfig, tokenizer: Tokenizer, sizes: SplitSizes) -> DatasetSplits:
        """Samples of sentences from ``--data-path`` and its relatives."""
        t5 = run.group(T5Config)
        return build_t5_splits(
            run.data,
            seed=run.training.seed,
            sizes=sizes,
            tokenizer=cast("SpanTokenizer", tokenizer),  # a kind that can't mask is refused with its name
            decoder_seq_length=t5.decoder_seq_length,
            vocab_size=run.model.vocab_size,
            mask_probability=t5.mask_prob,
            short_probability=t5.short_seq_prob,
        )

    @override
    def workload(self, run: RunConfig, context: ParallelContext) -> Workload:
        """Texts with padding for the encoder, shorter ones for the decoder."""
        length = run.group(T5Config).decoder_seq_length
        return dataclasses.replace(
            workload_of(run, context, has_padding=True), length=length, encoder_length=run.data.seq_length
        )


TRAIN_SPEC: TrainSpec = T5Spec()
