"""Training on pairs of a chosen and a rejected answer: DPO and its variants around a causal language model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from megatron.config.data import DataConfig
from megatron.config.moe import MoEConfig
from megatron.config.pipeline import Stage
from megatron.config.preference import PreferenceConfig
from megatron.config.run import RunConfig
from megatron.core.datasets.pairs import ANSWER, CHOSEN, IS_PAIR, NUMBER, REJECTED, PairDatasets
from megatron.core.datasets.scored import SCORES
from megatron.core.models.train_spec import TrainSpec
from megatron.core.objectives.answer_tokens import AnswerTokens, loss_and_slopes
from megatron.core.objectives.compared import CHOSEN_LOSS, ComparedObjective
from megatron.core.objectives.preference_losses import Answers, preference_losses, rewards
from megatron.core.objectives.rated import RatedObjective
from megatron.core.parallel.collectives import all_reduce
from megatron.core.parallel.context import ParallelContext
from megatron.core.pipeline_parallel.chunk import LossSum, Microbatch
from megatron.core.transformer.output_layer import VocabularyOutput

REPORTED = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
"""Means over pairs, by trl's names."""


def build(family: TrainSpec, run: RunConfig) -> ComparedObjective:
    """The objective that the run's settings choose."""
    settings = run.part(PreferenceConfig)
    return (RatedObjective if settings.rates_single_answers else PreferenceObjective)(family, settings)


class PreferenceObjective(ComparedObjective):
    """Pairs of answers in place of texts, and a loss of their log-probabilities in place of the cross entropy.

    A sample is a pair, and a loss is a mean over pairs. On context-parallel ranks, each of which knows all sums, the
    first one counts. ``settings``: of the run.
    """

    def __init__(self, family: TrainSpec, settings: PreferenceConfig) -> None:
        super().__init__(family, settings)
        self.batch_fields = {**family.batch_fields, ANSWER: 1, **dict.fromkeys((IS_PAIR, NUMBER, SCORES))}

    @override
    def loss_names(self, run: RunConfig) -> tuple[str, ...]:
        """The loss of pairs, the cross entropy of chosen answers, rewards, and losses of routers."""
        return (self.loss_name, CHOSEN_LOSS, *REPORTED, *run.part(MoEConfig).loss_names)

    @override
    def fields(self, run: RunConfig, stages: Sequence[Stage]) -> frozenset[str]:
        """The family's, and for the loss what is an answer, which pairs count, and what the initial model says."""
        own = (ANSWER, IS_PAIR, NUMBER, SCORES) if any(stage.is_last for stage in stages) else ()
        return self.family.fields(run, stages).union(own)

    @override
    def loss(self, output: Any, microbatch: Microbatch) -> LossSum:
        """The loss of each pair, summed; its gradient is that of weighted cross entropies of the answers' tokens."""
        assert isinstance(output, VocabularyOutput)
        pairs = _Pairs.of(output, microbatch)
        if self._recorded is not None:
            pairs.record(self._recorded)
            return LossSum(pairs.log_probs.new_zeros(()), pairs.log_probs.new_zeros(()))
        settings, weight = self.settings, microbatch.loss_weights.get(CHOSEN_LOSS, 1.0)
        total, slopes = pairs.loss(settings)
        slopes = torch.stack((slopes[0] - settings.sft_weight * weight * pairs.is_pair, slopes[1]))
        nll, tokens = pairs.chosen_loss()
        value = total * pairs.counts_here + settings.sft_weight * weight * nll
        value = pairs.tokens_here.with_gradient(value, pairs.of_tokens(slopes), microbatch.backward_scale)
        count = pairs.is_pair.sum() * pairs.counts_here
        found = {self.loss_name: (total * pairs.counts_here, count), CHOSEN_LOSS: (nll, tokens)}
        found |= {name: (each * pairs.counts_here, count) for name, each in pairs.rewards(settings).items()}
        parts = {name: torch.stack((one.detach(), two.to(one.dtype))) for name, (one, two) in found.items()}
        return LossSum(value, count, parts)

    @override
    def counts(self, microbatch: Microbatch, context: ParallelContext) -> Mapping[str, Tensor]:
        """Pairs, tokens of chosen answers, and what routers' losses are means over."""
        tensors = microbatch.tensors
        if IS_PAIR not in tensors:
            return {}
        pairs = tensors[IS_PAIR].sum() * (context.mesh.rank("cp") == 0)
        chosen = (tensors[ANSWER] == CHOSEN).sum()
        own = {**dict.fromkeys((self.loss_name, *REPORTED), pairs), CHOSEN_LOSS: chosen}
        return {**self.family.counts(microbatch, context), **own}

    @override
    def _reader(self, data: DataConfig, *, seed: int, vocab_size: int) -> PairDatasets:
        return PairDatasets(data, seed=seed, vocab_size=vocab_size)


@dataclass(frozen=True)
class _Pairs:
    """The answers of a microbatch: ``tokens_here`` of this context-parallel rank's part, ``answer`` [b, S] whose they
    are; ``token_log_probs`` [b, S], 0 elsewhere.

    Of all parts ``log_probs`` and ``tokens`` [2, b], of chosen and rejected answers. ``counts_here``: 1 on the rank
    that counts what all of them know, else 0.
    """

    tokens_here: AnswerTokens
    answer: Tensor
    token_log_probs: Tensor
    log_probs: Tensor
    tokens: Tensor
    reference: Tensor
    is_pair: Tensor
    numbers: Tensor
    counts_here: int

    @classmethod
    def of(cls, output: VocabularyOutput, microbatch: Microbatch) -> _Pairs:
        """Compute log-probabilities without gradient. A collective of tensor- and context-parallel ranks."""
        tensors, mesh = microbatch.tensors, output.context.mesh
        answer = tensors[ANSWER]
        found = AnswerTokens.of(output, tensors["labels"], answer > 0)
        losses = found.output.token_losses(found.labels).squeeze(0)
        each = losses.new_zeros(answer.shape)
        each[found.here] = -losses
        sides = torch.stack((answer == CHOSEN, answer == REJECTED))
        log_probs, tokens = all_reduce(torch.stack(((each * sides).sum(2), sides.sum(2).to(each.dtype))), mesh, "cp")
        return cls(
            tokens_here=found,
            answer=answer,
            token_log_probs=each,
            log_probs=log_probs,
            tokens=tokens,
            reference=tensors[SCORES].t().to(each.dtype),
            is_pair=tensors[IS_PAIR].to(each.dtype),
            numbers=tensors[NUMBER],
            counts_here=int(mesh.rank("cp") == 0),
        )

    def answers(self, log_probs: Tensor) -> tuple[Answers, Answers]:
        """Chosen and rejected answers with these log-probabilities [2, b]."""
        chosen, rejected = (Answers(*each) for each in zip(log_probs, self.reference, self.tokens))
        return chosen, rejected

    def loss(self, settings: PreferenceConfig) -> tuple[Tensor, Tensor]:
        """Sum of the pairs' losses, and its derivatives [2, b] by the log-probabilities of answers."""
        return loss_and_slopes(
            lambda log_probs: (preference_losses(settings, *self.answers(log_probs)) * self.is_pair).sum(),
            self.log_probs,
        )

    def chosen_loss(self) -> tuple[Tensor, Tensor]:
        """Sum of the cross entropies of this part's tokens of chosen answers, and their number."""
        chosen = self.answer == CHOSEN
        return -(self.token_log_probs * chosen).sum(), chosen.sum()

    def rewards(self, settings: PreferenceConfig) -> dict[str, Tensor]:
        """Sums over pairs of what is reported."""
        chosen, rejected = (rewards(settings, each) for each in self.answers(self.log_probs))
        found = (chosen, rejected, chosen - rejected, (chosen > rejected).to(chosen.dtype))
        return {name: (each * self.is_pair).sum() for name, each in zip(REPORTED, found)}

    def of_tokens(self, slopes: Tensor) -> Tensor:
        """What ``slopes`` [2, b] are of each token here, [n]: those of its answer."""
        chosen, rejected = slopes.unsqueeze(2)
        each: Tensor = chosen * (self.answer == CHOSEN) + rejected * (self.answer == REJECTED)
        return each[self.tokens_here.here]

    def record(self, table: Tensor) -> None:
        """Write log-probabilities into the rows [2] of their pairs."""
        if self.counts_here:
            real = self.is_pair > 0
            table[self.numbers[real].cpu()] = self.log_probs.t()[real].to(table)
