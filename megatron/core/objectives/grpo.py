"""GRPO around a causal language model: samples are answers of the model, and the loss compares their probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from megatron.config.grpo import GRPOConfig
from megatron.config.moe import MoEConfig
from megatron.config.pipeline import Stage
from megatron.config.run import RunConfig
from megatron.core.datasets.answers import (
    ADVANTAGE,
    COUNT,
    IS_ANSWER,
    OF_LABELS,
    OF_SAMPLES,
    OLD,
    PLACE,
    REFERENCE,
    REWARD,
    SHARE,
    SPREAD,
    MockAnswers,
)
from megatron.core.datasets.build import DatasetSplits
from megatron.core.datasets.prompts import LEARNED, check_same_fields, read_prompts
from megatron.core.datasets.splits import SplitSizes
from megatron.core.models.train_spec import TrainSpec
from megatron.core.objectives.answer_tokens import AnswerTokens, loss_and_slopes
from megatron.core.objectives.base import Objective
from megatron.core.objectives.grpo_losses import GeneratedTokens, loss_weights
from megatron.core.parallel.context import ParallelContext
from megatron.core.pipeline_parallel.chunk import LossSum, Microbatch
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.transformer.output_layer import VocabularyOutput

KL, ENTROPY, LENGTH = "kl", "entropy", "completions/mean_length"
CLIPPED = ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")
OF_TOKENS, OF_ANSWERS = (KL, ENTROPY, *CLIPPED), ("reward", "reward_std", LENGTH)
"""Means over tokens and over answers, by trl's names."""


def build(family: TrainSpec, run: RunConfig) -> GRPOObjective:
    """The objective of a run with ``--perform-rl-step``."""
    return GRPOObjective(family, run.part(GRPOConfig))


class GRPOObjective(Objective):
    """Answers in place of texts, and the clipped loss of their tokens in place of the cross entropy.

    What the loss of an answer's tokens is multiplied by and divided by is known with the samples, so it is the same at
    every layout; numbers of whole answers are counted by the first context-parallel rank. ``kept``: gives what
    checkpoints keep of answers that are being learned, as JSON and as files.
    """

    def __init__(self, family: TrainSpec, settings: GRPOConfig) -> None:
        super().__init__(family)
        self.settings = settings
        self.batch_fields = {
            **family.batch_fields,
            **dict.fromkeys(OF_LABELS, 1),
            **dict.fromkeys(OF_SAMPLES),
        }
        self.kept: Callable[[], tuple[Mapping[str, Any], Mapping[str, bytes]]] = lambda: ({}, {})
        self._table: Tensor | None = None

    @override
    def loss_names(self, run: RunConfig) -> tuple[str, ...]:
        """The loss, means over tokens and over answers, and losses of routers."""
        return (self.settings.loss_name, *self._reported, *run.part(MoEConfig).loss_names)

    @property
    def _reported(self) -> tuple[str, ...]:
        tokens = OF_TOKENS if self.settings.has_reference else OF_TOKENS[1:]
        return (*OF_ANSWERS, *tokens)

    @override
    def fields(self, run: RunConfig, stages: Sequence[Stage]) -> frozenset[str]:
        """The family's, and for the loss what is known of answers and their tokens."""
        own = (*OF_SAMPLES, *OF_LABELS) if any(stage.is_last for stage in stages) else ()
        return self.family.fields(run, stages).union(own)

    @override
    def loss(self, output: Any, microbatch: Microbatch) -> LossSum:
        """The loss of each token times its share, summed; its gradient is that of weighted cross entropies."""
        assert isinstance(output, VocabularyOutput)
        answers = _Answers.of(output.tempered(self.settings.rl_default_temperature), microbatch)
        if self._table is not None:
            self._table.view(-1)[answers.places.cpu()] = answers.log_probs.to(self._table)
            return LossSum(answers.log_probs.new_zeros(()), answers.log_probs.new_zeros(()))
        value, slopes = answers.loss(self.settings)
        value = answers.here.with_gradient(value, slopes, microbatch.backward_scale)
        found = {self.settings.loss_name: (value, answers.of_samples(COUNT)), **answers.reported(self.settings)}
        kept = (self.settings.loss_name, *self._reported)
        parts = {name: torch.stack((found[name][0].detach(), found[name][1])) for name in kept}
        return LossSum(value, answers.of_samples(COUNT), parts)

    @override
    def counts(self, microbatch: Microbatch, context: ParallelContext) -> Mapping[str, Tensor]:
        """What the loss is divided by, tokens, answers, and what routers' losses are means over."""
        tensors = microbatch.tensors
        if IS_ANSWER not in tensors:
            return {}
        is_first, tokens = context.mesh.rank("cp") == 0, tensors["loss_mask"].sum()
        own = dict.fromkeys(OF_TOKENS, tokens) | dict.fromkeys(OF_ANSWERS, tensors[IS_ANSWER].sum() * is_first)
        own[self.settings.loss_name] = tensors[COUNT].sum() * is_first
        return {**self.family.counts(microbatch, context), **own}

    @override
    def build_datasets(self, run: RunConfig, tokenizer: Tokenizer, sizes: SplitSizes) -> DatasetSplits:
        """None: a run makes its samples. With ``--mock-data`` random answers, which no model gave."""
        if not run.data.mock_data:
            return DatasetSplits(None, None, None)
        assert run.model.vocab_size is not None
        settings, length = self.settings, run.data.seq_length
        samples = MockAnswers(
            vocab_size=run.model.vocab_size,
            length=length,
            seed=run.training.seed,
            num_samples=sizes.train or 0,
            weigh=lambda count: loss_weights(settings, count, mean_length=length / 4),
            has_old=settings.steps(run.training.global_batch_size) > 1,
        )
        return DatasetSplits(samples, None, None)

    @override
    def check_beside(self, run: RunConfig, tokenizer: Tokenizer) -> Sequence[str]:
        """The prompts, and the file of the reward function; raises MegatronError for what can't be used."""
        if run.data.mock_data:
            return ()
        learned, held_out = self.settings.grpo_prompts, self.settings.grpo_eval_prompts
        files = {LEARNED: () if run.training.skip_train else learned, "--grpo-eval-prompts": held_out}
        prompts = {flag: read_prompts(each, flag=flag) for flag, each in files.items() if each}
        check_same_fields([each[0] for each in prompts.values()])
        path, name = self.settings.rewards.place
        lines = (f"{len(each):,} prompts in {' '.join(files[flag])}" for flag, each in prompts.items())
        return (*lines, f"rewards: {name} of {path}")

    @override
    def state(self) -> Mapping[str, Any]:
        """How far the run is with prompts and answers."""
        return self.kept()[0]

    @override
    def files(self) -> Mapping[str, bytes]:
        """Answers that are being learned."""
        return self.kept()[1]

    @contextmanager
    def recording(self, table: Tensor) -> Iterator[None]:
        """While the block lasts, ``loss`` writes log-probabilities into ``table`` [answers, labels], and nothing else;
        each rank those of its own labels.
        """
        self._table = table
        try:
            yield
        finally:
            self._table = None


@dataclass(frozen=True)
class _Answers:
    """The answers of a microbatch: ``here`` those of this context-parallel rank's labels that are of answers, ``[n]``,
    or one of none where there aren't any, whose ``shares`` are 0.

    ``tokens`` as the loss sees them, with their ``entropies``, ``counted``: 1 where a label is of an answer.
    ``samples``: fields of samples [b]. ``counts_here``: 1 on the rank that counts answers, else 0.
    """

    here: AnswerTokens
    tokens: GeneratedTokens
    entropies: Tensor
    shares: Tensor
    counted: Tensor
    places: Tensor
    samples: Mapping[str, Tensor]
    counts_here: int

    @classmethod
    def of(cls, output: VocabularyOutput, microbatch: Microbatch) -> _Answers:
        """Compute log-probabilities and entropies without gradient. A collective of tensor-parallel ranks."""
        tensors = microbatch.tensors
        mask = tensors["loss_mask"] > 0
        found = AnswerTokens.of(output, tensors["labels"], mask)
        here, scored = found.here, found.output.token_losses_and_entropies(found.labels)
        losses, entropies = (each.squeeze(0) for each in scored)
        wide = losses.dtype
        samples = {name: tensors[name].to(wide) for name in OF_SAMPLES}
        each = {name: samples[name].unsqueeze(1).expand(mask.shape)[here] for name in (ADVANTAGE, SHARE)}
        old, counted = tensors[OLD][here].to(wide), mask[here].to(wide)
        tokens = GeneratedTokens(
            log_probs=-losses,
            old=torch.where(old.isnan(), -losses, old),
            reference=tensors[REFERENCE][here].to(wide),
            advantages=each[ADVANTAGE],
        )
        return cls(
            here=found,
            tokens=tokens,
            entropies=entropies,
            shares=each[SHARE] * counted,
            counted=counted,
            places=tensors[PLACE][here],
            samples={**samples, LENGTH: tensors["loss_mask"].to(wide)},
            counts_here=int(output.context.mesh.rank("cp") == 0),
        )

    @property
    def log_probs(self) -> Tensor:
        """Log-probabilities of the tokens."""
        return self.tokens.log_probs

    def of_samples(self, name: str) -> Tensor:
        """Sum of a field of samples, on the rank that counts them."""
        return self.samples[name].sum() * self.counts_here

    def loss(self, settings: GRPOConfig) -> tuple[Tensor, Tensor]:
        """Sum of the tokens' losses, each times its share, and its derivatives [n] by their log-probabilities."""
        reference = self.tokens.reference if settings.has_reference else None
        at = partial(GeneratedTokens, old=self.tokens.old, reference=reference, advantages=self.tokens.advantages)
        return loss_and_slopes(lambda each: (at(each).losses(settings) * self.shares).sum(), self.log_probs)

    def reported(self, settings: GRPOConfig) -> dict[str, tuple[Tensor, Tensor]]:
        """Sums and counts of what is reported beside the loss."""
        tokens, answers = self.counted.sum(), self.of_samples(IS_ANSWER)
        below, above = self.tokens.clipped(settings)
        of_tokens = (self.tokens.weighted_divergences(settings), self.entropies, below, above, below | above)
        lengths = (self.samples[LENGTH].sum(1) * self.samples[IS_ANSWER]).sum()
        of_answers = (self.of_samples(REWARD), self.of_samples(SPREAD), lengths)
        found = {name: ((each * self.counted).sum(), tokens) for name, each in zip(OF_TOKENS, of_tokens)}
        return found | {name: (each, answers) for name, each in zip(OF_ANSWERS, of_answers)}
