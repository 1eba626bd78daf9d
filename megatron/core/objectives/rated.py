"""Training on answers that are rated alone: KTO around a causal language model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from megatron.config.data import DataConfig
from megatron.config.moe import MoEConfig
from megatron.config.pipeline import Stage
from megatron.config.preference import PreferenceConfig
from megatron.config.run import RunConfig
from megatron.core.datasets.build import DatasetSplits
from megatron.core.datasets.rated import (
    DESIRABLE,
    LABEL,
    MISMATCHED,
    PLACE,
    UNDESIRABLE,
    RatedDatasets,
    describe_labels,
    labels_of,
)
from megatron.core.datasets.scored import SCORES, unique_samples
from megatron.core.datasets.splits import SplitSizes
from megatron.core.models.train_spec import TrainSpec
from megatron.core.objectives.answer_tokens import AnswerTokens, loss_and_slopes
from megatron.core.objectives.compared import CHOSEN_LOSS, ComparedObjective
from megatron.core.objectives.preference_losses import Answers, rated_losses, rewards
from megatron.core.parallel.collectives import all_reduce
from megatron.core.parallel.context import ParallelContext
from megatron.core.pipeline_parallel.chunk import LossSum, Microbatch
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.transformer.output_layer import VocabularyOutput

KL, REWARDS = "kl", ("rewards/chosen", "rewards/rejected")
"""The baseline, and mean rewards of desirable and of undesirable answers, by trl's names."""


class RatedObjective(ComparedObjective):
    """Answers that are desirable or not in place of texts, and a loss of each one's log-probability.

    With KTO what an answer's reward is compared with is the mean over the global batch of how much likelier other
    answers have become behind the same prompts: known before the first backward pass, the same at every layout, and
    without a gradient. Context-parallel ranks count as with pairs.
    """

    def __init__(self, family: TrainSpec, settings: PreferenceConfig) -> None:
        super().__init__(family, settings)
        self.batch_fields = {**family.batch_fields, **dict.fromkeys((LABEL, PLACE, SCORES))}
        if settings.has_baseline:
            self.batch_fields |= {f"{MISMATCHED}{name}": dim for name, dim in family.batch_fields.items()}
        self._measures = False

    @override
    def loss_names(self, run: RunConfig) -> tuple[str, ...]:
        """The loss, the cross entropy of desirable answers, rewards, the baseline, and losses of routers."""
        return (self.loss_name, CHOSEN_LOSS, *REWARDS, *self._baseline, *run.part(MoEConfig).loss_names)

    @property
    def _baseline(self) -> tuple[str, ...]:
        return (KL,) if self.settings.has_baseline else ()

    @override
    def fields(self, run: RunConfig, stages: Sequence[Stage]) -> frozenset[str]:
        """The family's, also of other answers behind the prompts, and for the loss the labels and the scores."""
        own = (LABEL, PLACE, SCORES) if any(stage.is_last for stage in stages) else ()
        of_text = self.family.fields(run, stages)
        other = [f"{MISMATCHED}{name}" for name in of_text] if self.settings.has_baseline else ()
        return of_text.union(own, other)

    @override
    def add_derived_fields(self, batch: Mapping[str, Tensor], run: RunConfig) -> Mapping[str, Tensor]:
        """The family's, of both texts."""
        own, other = _divided(batch)
        derived = self.family.add_derived_fields(other, run) if other else {}
        found = {f"{MISMATCHED}{name}": each for name, each in derived.items()}
        return {**self.family.add_derived_fields(own, run), **found}

    @override
    def look_ahead(
        self,
        microbatches: Sequence[Microbatch],
        forward: Callable[[Sequence[Microbatch]], Mapping[str, Tensor]],
    ) -> Sequence[Microbatch]:
        """Measure the divergence from the initial model on other answers behind the batch's prompts."""
        if not self.settings.has_baseline or self._recorded is not None:
            return microbatches
        others = list[Microbatch]()
        for each in microbatches:
            own, other = _divided(each.tensors)
            known = {name: own[name] for name in (LABEL, PLACE, SCORES) if name in own}
            others.append(replace(each, tensors={**other, **known}))
        self._measures = True
        total, count = forward(others)[KL]
        self._measures = False
        baseline = (total / count.clamp(min=1)).clamp(min=0)
        return [replace(each, tensors={**each.tensors, KL: baseline}) for each in microbatches]

    @override
    def loss(self, output: Any, microbatch: Microbatch) -> LossSum:
        """The loss of each answer, summed; its gradient is that of weighted cross entropies of the answers' tokens."""
        assert isinstance(output, VocabularyOutput)
        rated = _Rated.of(output, microbatch)
        nothing = rated.log_probs.new_zeros(())
        if self._recorded is not None:
            rated.record(self._recorded)
            return LossSum(nothing, nothing)
        if self._measures:
            ratios = (rated.log_probs - rated.reference[:, 1]) * rated.is_rated
            return LossSum(nothing, nothing, {KL: rated.summed(ratios, rated.is_rated)})
        settings, weight = self.settings, microbatch.loss_weights.get(CHOSEN_LOSS, 1.0)
        total, slopes = loss_and_slopes(lambda each: rated.losses(settings, each).sum(), rated.log_probs)
        slopes = slopes - settings.sft_weight * weight * rated.is_desirable
        nll, tokens = rated.desirable_loss()
        value = total * rated.counts_here + settings.sft_weight * weight * nll
        value = rated.here.with_gradient(value, rated.of_tokens(slopes), microbatch.backward_scale)
        parts = {
            self.loss_name: torch.stack((total, rated.is_rated.sum())) * rated.counts_here,
            CHOSEN_LOSS: torch.stack((nll, tokens)),
            **{name: rated.rewards(settings, label) for name, label in zip(REWARDS, (DESIRABLE, UNDESIRABLE))},
            **{name: rated.summed(rated.baseline * rated.is_rated, rated.is_rated) for name in self._baseline},
        }
        return LossSum(value, parts[self.loss_name][1], parts)

    @override
    def counts(self, microbatch: Microbatch, context: ParallelContext) -> Mapping[str, Tensor]:
        """Answers, tokens of desirable ones, and what routers' losses are means over."""
        tensors = microbatch.tensors
        if LABEL not in tensors:
            return {}
        label, counts_here = tensors[LABEL], context.mesh.rank("cp") == 0
        good, bad = ((label == each).sum() * counts_here for each in (DESIRABLE, UNDESIRABLE))
        own = {**dict.fromkeys((self.loss_name, *self._baseline), good + bad), **dict(zip(REWARDS, (good, bad)))}
        own[CHOSEN_LOSS] = (tensors["loss_mask"] * (label == DESIRABLE).unsqueeze(1)).sum()
        return {**self.family.counts(microbatch, context), **own}

    @override
    def _reader(self, data: DataConfig, *, seed: int, vocab_size: int) -> RatedDatasets:
        return RatedDatasets(data, seed=seed, vocab_size=vocab_size, mismatched=self.settings.has_baseline)

    @override
    def build_datasets(self, run: RunConfig, tokenizer: Tokenizer, sizes: SplitSizes) -> DatasetSplits:
        """Rated answers from ``--data-path`` and its relatives, and how many are of each label."""
        found, settings = super().build_datasets(run, tokenizer, sizes), self.settings
        weights = settings.desirable_weight, settings.undesirable_weight
        sources = (each.documents for each, _ in unique_samples(self._datasets))
        labels = [f"{each.prefix}: {describe_labels(labels_of(each), weights)}" for each in sources]
        return replace(found, remarks=[*found.remarks, *labels])


def _divided(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The fields of a batch's own texts and what else there is, and those of other answers behind their prompts."""
    other = {name.removeprefix(MISMATCHED): each for name, each in tensors.items() if name.startswith(MISMATCHED)}
    return {name: each for name, each in tensors.items() if not name.startswith(MISMATCHED)}, other


@dataclass(frozen=True)
class _Rated:
    """The answers of a microbatch: ``here`` their tokens of this context-parallel rank's part, ``mask`` [b, S] which
    these are, and ``token_log_probs`` [b, S], 0 elsewhere.

    Of all parts ``log_probs`` and ``label`` [b]; ``reference`` [b, 2]: the initial model's, also of the other answer.
    ``counts_here``: 1 on the rank that counts what all of them know, else 0.
    """

    here: AnswerTokens
    mask: Tensor
    token_log_probs: Tensor
    log_probs: Tensor
    label: Tensor
    reference: Tensor
    places: Tensor
    baseline: Tensor
    counts_here: int

    @classmethod
    def of(cls, output: VocabularyOutput, microbatch: Microbatch) -> _Rated:
        """Compute log-probabilities without gradient. A collective of tensor- and context-parallel ranks."""
        tensors, mesh = microbatch.tensors, output.context.mesh
        mask = tensors["loss_mask"] > 0
        here = AnswerTokens.of(output, tensors["labels"], mask)
        losses = here.output.token_losses(here.labels).squeeze(0)
        each = losses.new_zeros(mask.shape)
        each[here.here] = -losses
        each = each * mask
        return cls(
            here=here,
            mask=mask,
            token_log_probs=each,
            log_probs=all_reduce(each.sum(1), mesh, "cp"),
            label=tensors[LABEL],
            reference=tensors[SCORES].to(each.dtype),
            places=tensors[PLACE],
            baseline=tensors.get(KL, each.new_zeros(())).to(each.dtype),
            counts_here=int(mesh.rank("cp") == 0),
        )

    @property
    def is_rated(self) -> Tensor:
        """1 for each answer, 0 for what fills a batch, [b]."""
        return (self.label > 0).to(self.log_probs.dtype)

    @property
    def is_desirable(self) -> Tensor:
        """1 for each desirable answer, [b]."""
        return (self.label == DESIRABLE).to(self.log_probs.dtype)

    def losses(self, settings: PreferenceConfig, log_probs: Tensor) -> Tensor:
        """The loss of each answer with these log-probabilities, [b]."""
        answers = self._answers(log_probs)
        return rated_losses(settings, answers, self.label == DESIRABLE, self.baseline) * self.is_rated

    def rewards(self, settings: PreferenceConfig, label: int) -> Tensor:
        """Sum of the rewards of answers with a label, and their number."""
        is_one = (self.label == label).to(self.log_probs.dtype)
        return self.summed(rewards(settings, self._answers(self.log_probs)) * is_one, is_one)

    def summed(self, values: Tensor, counted: Tensor) -> Tensor:
        """Sum and number, [2], of what all ranks know, on the one that counts it."""
        return torch.stack((values.sum(), counted.sum())) * self.counts_here

    def desirable_loss(self) -> tuple[Tensor, Tensor]:
        """Sum of the cross entropies of this part's tokens of desirable answers, and their number."""
        good = self.is_desirable.unsqueeze(1) * self.mask
        return -(self.token_log_probs * good).sum(), good.sum()

    def of_tokens(self, slopes: Tensor) -> Tensor:
        """What ``slopes`` [b] are of each token here, [n]: those of its answer."""
        return (slopes.unsqueeze(1) * self.mask)[self.here.here]

    def record(self, table: Tensor) -> None:
        """Write log-probabilities into their places of the table of scores."""
        if self.counts_here:
            real = self.label > 0
            table.view(-1)[self.places[real].cpu()] = self.log_probs[real].cpu().to(table)

    def _answers(self, log_probs: Tensor) -> Answers:
        return Answers(log_probs, self.reference[:, 0], self.mask.sum(1))
