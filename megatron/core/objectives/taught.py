"""What objectives with a teacher have in common: the divergence from it, mixed with the family's loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor
from typing_extensions import override

from megatron.config.distillation import DistillationConfig
from megatron.config.run import RunConfig
from megatron.core.models.train_spec import TrainSpec
from megatron.core.objectives.base import Objective
from megatron.core.parallel.context import ParallelContext
from megatron.core.pipeline_parallel.chunk import LossSum, Microbatch
from megatron.core.tensor_parallel.distillation import Mix, Target
from megatron.core.transformer.output_layer import VocabularyOutput

LOSS = "logits distillation loss"
"""Name of the divergence in reports, a mean over the tokens of the family's first loss."""


class TaughtObjective(Objective):
    """(1 - share) · the family's first loss + share · scale · the divergence from a teacher."""

    def __init__(self, family: TrainSpec, settings: DistillationConfig) -> None:
        super().__init__(family)
        self._settings = settings

    @override
    def loss_names(self, run: RunConfig) -> tuple[str, ...]:
        """The family's, and the divergence."""
        return (*super().loss_names(run), LOSS)

    @override
    def counts(self, microbatch: Microbatch, context: ParallelContext) -> Mapping[str, Tensor]:
        """The family's; the divergence is of the tokens of its first loss."""
        found = super().counts(microbatch, context)
        return {**found, LOSS: next(iter(found.values()))} if found else found

    def taught_loss(self, student: VocabularyOutput, target: Target, microbatch: Microbatch) -> LossSum:
        """The loss of a microbatch against ``target``, whose rows are those of the student's hidden states."""
        tensors, settings = microbatch.tensors, self._settings
        mix = Mix(
            cross_entropy=1.0 - settings.share,
            divergence=settings.share * settings.scale,
            temperature=settings.temperature,
        )
        scale = microbatch.backward_scale
        sums = student.distilled(tensors["labels"], tensors["loss_mask"], target, mix=mix, backward_scale=scale)
        found = self.family.loss(dataclasses.replace(student, given_loss=sums.total), microbatch)
        main, count = next(iter(found.parts)), found.count.detach()
        parts = {main: _pair(sums.cross_entropy, count), LOSS: _pair(sums.divergence, count)}
        return dataclasses.replace(found, parts={**found.parts, **parts})


def _pair(total: Tensor, count: Tensor) -> Tensor:
    return torch.stack((total, count.to(total.dtype)))
