"""Training on pairs of a chosen and a rejected answer: DPO and its variants around a causal language model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from megatron.config.moe import MoEConfig
from megatron.config.pipeline import Stage
from megatron.config.preference import PreferenceConfig
from megatron.config.run import RunConfig
from megatron.core.datasets.build import DatasetSplits, build_splits
from megatron.core.datasets.pairs import (
    ANSWER,
    CHOSEN,
    IS_PAIR,
    NUMBER,
    REJECTED,
    SCORES,
    PairDataset,
    PairDatasets,
    unique_pairs,
)
from megatron.core.datasets.splits import SplitSizes
from megatron.core.files.remote_path import AnyPath, path_of
from megatron.core.files.writable import try_to_write
from megatron.core.models.first_pass import FirstPass, OnFirst
from megatron.core.models.train_spec import TrainSpec
from megatron.core.objectives.answer_tokens import AnswerTokens, loss_and_slopes
from megatron.core.objectives.base import Objective
from megatron.core.objectives.preference_losses import Answers, preference_losses, rewards
from megatron.core.objectives.reference import FILE_NAME, Reference
from megatron.core.parallel.collectives import all_reduce
from megatron.core.parallel.context import ParallelContext
from megatron.core.pipeline_parallel.chunk import LossSum, Microbatch
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.transformer.output_layer import VocabularyOutput
from megatron.errors import CheckpointError, ConfigError

CHOSEN_LOSS = "chosen lm loss"
REPORTED = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
"""Means over pairs, by trl's names."""
_STATE = "reference"


def build(family: TrainSpec, run: RunConfig) -> PreferenceObjective:
    """The objective that the run's settings choose."""
    return PreferenceObjective(family, run.part(PreferenceConfig))


class PreferenceObjective(Objective):
    """Pairs of answers in place of texts, and a loss of their log-probabilities in place of the cross entropy.

    A sample is a pair, and a loss is a mean over pairs. On context-parallel ranks, each of which knows all sums, the
    first one counts. ``settings``: of the run.
    """

    def __init__(self, family: TrainSpec, settings: PreferenceConfig) -> None:
        super().__init__(family)
        assert settings.preference_loss is not None
        self._settings, self._loss_name = settings, settings.preference_loss
        self.batch_fields = {**family.batch_fields, ANSWER: 1, **dict.fromkeys((IS_PAIR, NUMBER, SCORES))}
        self._datasets: Sequence[PairDataset] = ()
        self._digest: str | None = None
        self._recorded: Tensor | None = None

    @override
    def loss_names(self, run: RunConfig) -> tuple[str, ...]:
        """The loss of pairs, the cross entropy of chosen answers, rewards, and losses of routers."""
        return (self._loss_name, CHOSEN_LOSS, *REPORTED, *run.part(MoEConfig).loss_names)

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
        settings, weight = self._settings, microbatch.loss_weights.get(CHOSEN_LOSS, 1.0)
        total, slopes = pairs.loss(settings)
        slopes = torch.stack((slopes[0] - settings.sft_weight * weight * pairs.is_pair, slopes[1]))
        nll, tokens = pairs.chosen_loss()
        value = total * pairs.counts_here + settings.sft_weight * weight * nll
        value = pairs.tokens_here.with_gradient(value, pairs.of_tokens(slopes), microbatch.backward_scale)
        count = pairs.is_pair.sum() * pairs.counts_here
        found = {self._loss_name: (total * pairs.counts_here, count), CHOSEN_LOSS: (nll, tokens)}
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
        own = {**dict.fromkeys((self._loss_name, *REPORTED), pairs), CHOSEN_LOSS: chosen}
        return {**self.family.counts(microbatch, context), **own}

    @override
    def build_datasets(self, run: RunConfig, tokenizer: Tokenizer, sizes: SplitSizes) -> DatasetSplits:
        """Pairs from ``--data-path`` and its relatives."""
        assert run.model.vocab_size is not None
        data, vocab_size = dataclasses.replace(run.data, sft=True), run.model.vocab_size
        pairs = PairDatasets(data, seed=run.training.seed, tokenizer=tokenizer, vocab_size=vocab_size)
        found = build_splits(data, pairs, sizes=sizes, tokenizer=tokenizer, vocab_size=vocab_size)
        self._datasets = pairs.datasets
        return found

    @override
    def state(self) -> Mapping[str, Any]:
        """A digest of the initial model's log-probabilities."""
        return {} if self._digest is None else {_STATE: self._digest}

    @override
    def before_training(self, first: FirstPass) -> Sequence[str]:
        """Compute the log-probabilities of the initial model, or take them from their file.

        Raises ConfigError for a file of another model or other pairs, and, before anything is computed, for one that
        can't be written; CheckpointError for one that a run that goes on needs and that is missing or another one.
        """
        if not self._settings.has_reference:
            return ()
        sources, given = unique_pairs(self._datasets), self._settings.preference_reference
        place = path_of(given) if given else None if first.save is None else first.save / FILE_NAME
        earlier = None if given or first.load is None else first.load / FILE_NAME
        path = next((each for each in (place, earlier) if each is not None and first.on_first(each.exists)), None)
        stored = None if path is None else first.on_first(partial(Reference.read, path))
        if saved := first.state.get(_STATE):
            found = _same_as_before(stored, path or place or earlier, saved)
            found.check(path, model=found.model, sources=sources)
        elif stored is not None and path == place:
            found = stored
            found.check(path, model=first.model, sources=sources)
        else:
            if given:
                _check_writable(path_of(given), first.on_first)
            found, path = self._computed(first, sources), None
        if place is not None and path != place:
            first.on_first(partial(found.write, place))
        for dataset, _ in sources:
            dataset.scores.values[:] = found.scores[dataset.scores.digest]
        self._digest = found.digest
        how = f"read from {path}" if path else f"computed, and kept in {place}" if place else "computed"
        return (f"log-probabilities of the initial model: {how}",)

    def _computed(self, first: FirstPass, sources: Sequence[tuple[PairDataset, NDArray[np.int64]]]) -> Reference:
        mesh, size = first.context.mesh, first.config.training.micro_batch_size
        replica, replicas = mesh.rank("dp") * mesh.size("dc") + mesh.rank("dc"), mesh.size("dc", "dp")
        scores = dict[str, NDArray[np.float64]]()
        for dataset, numbers in sources:
            table = self._recorded = torch.zeros(dataset.scores.values.shape, dtype=torch.float64)
            mine = numbers[replica::replicas]
            for start in range(0, -(-len(numbers) // replicas), size * first.at_once):
                starts = range(start, start + size * first.at_once, size)
                first.forward([_batch(dataset, mine[each : each + size], size) for each in starts])
            self._recorded = None
            whole = all_reduce(table.to(first.context.device), mesh, "dc", "pp", "dp", "cp").cpu().numpy()
            scores[dataset.scores.digest] = np.full_like(dataset.scores.values, np.nan)
            scores[dataset.scores.digest][numbers] = whole[numbers]
        return Reference(first.model, scores)


def _check_writable(path: AnyPath, on_first: OnFirst) -> None:
    """Make the folder of a file that will be written; raises ConfigError where it can't be. A collective."""
    try:
        on_first(partial(try_to_write, path.parent))
    except CheckpointError as error:
        raise ConfigError(
            f"--preference-reference {path} cannot be written: {error}; name a file in a folder that can be written",
            exit_code=error.exit_code,
        ) from error


def _same_as_before(stored: Reference | None, path: AnyPath | None, saved: str) -> Reference:
    """The file that the checkpoint was trained with; raises CheckpointError."""
    if stored is None:
        raise CheckpointError(
            f"{path} is missing, which holds the log-probabilities that the checkpoint was trained with: put the file "
            "back, or begin anew with --finetune"
        )
    if stored.digest != saved:
        raise CheckpointError(
            f"{path} holds other log-probabilities than those that the checkpoint was trained with: put back the file "
            "that was there, or begin anew with --finetune"
        )
    return stored


def _batch(dataset: PairDataset, numbers: NDArray[np.int64], size: int) -> dict[str, Tensor]:
    """Pairs by their numbers as a microbatch, filled up with samples that are none."""
    samples = [dataset.pair(number) for number in numbers.tolist()]
    if len(samples) < size:
        samples += [dataset.without_loss(dataset.pair(dataset.order.numbers.item(0)))] * (size - len(samples))
    return {name: torch.from_numpy(np.stack([sample[name] for sample in samples])) for name in samples[0]}


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
