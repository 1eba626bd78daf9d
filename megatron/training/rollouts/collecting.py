"""Batches of answers that the model in training gives, rated by a function of the user's: GRPO's samples."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from megatron.config.flags import plural_s
from megatron.core.checkpointing.agreement import run_on_all
from megatron.core.datasets.answers import Answer, batch_of
from megatron.core.datasets.index_build import random_state
from megatron.core.datasets.prompts import PromptTexts, read_prompts
from megatron.core.files.remote_path import path_of
from megatron.core.inference.sampling import Sampling
from megatron.core.objectives.grpo import GRPOObjective
from megatron.core.objectives.grpo_losses import advantages, deviations, loss_weights
from megatron.core.parallel.collectives import all_reduce
from megatron.core.parallel.rng import StreamKey
from megatron.core.pipeline_parallel.chunk import Microbatch
from megatron.errors import CheckpointError
from megatron.training.evaluation.evaluate import evaluate
from megatron.training.rollouts import stored
from megatron.training.rollouts.generation import seed_of
from megatron.training.rollouts.held_out import HeldOut
from megatron.training.rollouts.rated import Rated, Rater, check_ranks_read_the_same
from megatron.training.rollouts.reference import ReferenceWeights
from megatron.training.run.run import Run

_STATE, _EVALUATED = "grpo", "evaluated_at"


@dataclass(frozen=True)
class TrainingBatches:
    """This rank's microbatches of each step that is left, and held-out prompts to evaluate on, if there are any."""

    batches: Iterator[list[Microbatch]]
    held_out: HeldOut | None = None

    def evaluate_if_due(self) -> None:
        """Let the model answer held-out prompts before the first step, at intervals and after the last step."""
        if self.held_out is not None:
            self.held_out.evaluate_if_due()


def training_batches(run: Run) -> TrainingBatches:
    """What the run learns from: data, or answers of the model. A collective."""
    objective = run.train_spec
    if isinstance(objective, GRPOObjective) and not run.config.data.mock_data:
        rollouts = Rollouts(run, objective)
        return TrainingBatches(rollouts.batches(), rollouts.held_out)
    return TrainingBatches(run.data.training_batches(run.progress.consumed_samples))


class Rollouts:
    """Makes the answers that a run learns from, and the batches of its steps on them.

    Answers to a prompt depend on the weights, the seed, how many times the run has made answers, and the prompt. Every
    rank knows all of them. What a checkpoint needs to go on in the middle of them is in ``GRPOObjective.kept``.
    """

    def __init__(self, run: Run, objective: GRPOObjective) -> None:
        """Read the prompts, keep or load the initial weights, start the reward function. A collective.

        Raises DataError for prompts, ConfigError for a reward function or a model, and CheckpointError for a checkpoint
        to go on from, that can't be used.
        """
        self._run, self._objective, self._settings = run, objective, objective.settings
        settings, saved = self._settings, run.spec_state.get(_STATE)
        length, most = run.config.data.seq_length, settings.most_tokens
        self._texts = PromptTexts(
            read_prompts(settings.prompt_files),
            run.tokenizer,
            run.chat,
            tokenizer_model=run.config.tokenizer.tokenizer_model,
            longest=length - most,
            seed=run.config.training.seed,
        )
        self._steps = settings.steps(run.config.training.global_batch_size)
        self._answers, self._taken, self._made, self._place = list[Answer](), 0, 0, 0
        check_ranks_read_the_same(self._texts, run.context.mesh)
        self._check_prompts(saved)
        self._reference = self._reference_of(saved)
        if saved is not None:
            self._resume(saved)
        temperature, top_p, top_k = settings.sampling
        self._sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k)
        self._rater = Rater(run, settings)
        objective.kept = self._kept
        left_out = f", {self._texts.left_out:,} are left out, as they are longer" if self._texts.left_out else ""
        run.reporter.say(
            f"learning from answers to {len(self._texts.tokens):,} prompts of up to {length - most} tokens{left_out}; "
            f"{settings.answers:,} answers at a time, {self._steps} step{plural_s(self._steps)} on them"
        )
        self.held_out: HeldOut | None = None
        if settings.grpo_eval_prompts:
            # Checkpoints of before this was kept were saved when the evaluation of their iteration was done.
            at = None if saved is None else saved.get(_EVALUATED, run.progress.iteration)
            self.held_out = HeldOut(run, settings, self._rater, learned=self._texts, evaluated_at=at)

    def batches(self) -> Iterator[list[Microbatch]]:
        """This rank's microbatches of each step, without end. The next one is a collective."""
        trained_since = time.perf_counter()
        try:
            while True:
                if not self._answers:
                    self._collect(training_seconds=time.perf_counter() - trained_since)
                    trained_since = time.perf_counter()
                yield self._next_step()
        finally:
            self._rater.close()

    def _check_prompts(self, saved: Mapping[str, Any] | None) -> None:
        if saved is not None and saved["prompts"] != self._texts.digest:
            raise CheckpointError(
                f"the checkpoint was trained on other prompts than those of --grpo-prompts "
                f"{' '.join(self._settings.prompt_files)}, or --seq-length and --grpo-max-new-tokens left room for "
                "others: give those, or begin anew with --finetune"
            )

    def _reference_of(self, saved: Mapping[str, Any] | None) -> ReferenceWeights | None:
        if not self._settings.has_reference:
            return None
        return ReferenceWeights(self._run, None if saved is None else saved.get("reference") or {"path": None})

    def _resume(self, saved: Mapping[str, Any]) -> None:
        """Go on where the checkpoint's run was, which may have been in the middle of some answers."""
        self._made, self._place, self._taken = saved["made"], saved["place"], saved["taken"]
        if not self._taken:
            return
        if saved["sizes"] != self._sizes:
            names = ("--grpo-prompts-per-step", "--grpo-group-size", "--grpo-iterations", "--global-batch-size")
            then = ", ".join(f"{name} {size}" for name, size in zip(names, saved["sizes"]))
            raise CheckpointError(
                f"{self._run.loaded_from} was saved in the middle of answers that were made with {then}: give these, "
                "or begin anew with --finetune"
            )
        path = path_of(self._run.loaded_from or "") / stored.FILE_NAME
        self._answers = run_on_all(lambda: stored.read(path), self._run.context.mesh)
        if self._reference is not None and self._answers[0].reference is None:
            self._answers = self._with_scores(self._answers, "reference", self._reference)

    @property
    def _sizes(self) -> list[int]:
        return [*self._settings.sizes, self._run.config.training.global_batch_size]

    def _kept(self) -> tuple[Mapping[str, Any], Mapping[str, bytes]]:
        """What a checkpoint keeps: counters, and the answers in the middle of which it is."""
        state = {
            "prompts": self._texts.digest,
            "made": self._made,
            "place": self._place,
            "taken": self._taken,
            "sizes": self._sizes,
            **({} if self._reference is None else {"reference": self._reference.state}),
            **({} if self.held_out is None else {_EVALUATED: self.held_out.evaluated_at}),
        }
        return {_STATE: state}, {stored.FILE_NAME: stored.to_bytes(self._answers)} if self._taken else {}

    def _collect(self, *, training_seconds: float) -> None:
        """Make the next answers, and all that the steps on them need. A collective; raises RolloutError."""
        count, each, _ = self._settings.sizes
        numbers = [self._texts.at(self._place + place) for place in range(count)]
        seeds = [seed_of(self._run.config.training.seed, self._made, number) for number in numbers]
        with self._run.context.mesh.activity.during("generation of answers"):
            groups, seconds = self._rater.rated(self._texts, numbers, seeds, each=each, sampling=self._sampling)
        start = time.perf_counter()
        answers = self._answers_of(numbers, groups)
        if self._steps > 1:
            answers = self._with_scores(answers, "old", None)
        if self._reference is not None:
            answers = self._with_scores(answers, "reference", self._reference)
        seconds["scoring"] = time.perf_counter() - start
        self._answers, self._taken = answers, 0
        self._made, self._place = self._made + 1, self._place + len(numbers)
        self._report(groups, {**seconds, "training": training_seconds})

    def _answers_of(self, numbers: Sequence[int], groups: Sequence[Sequence[Rated]]) -> list[Answer]:
        settings = self._settings
        rewards = torch.tensor(
            [[np.nan if each.reward is None else each.reward for each in group] for group in groups],
            dtype=torch.float64,
        )
        scaled, spreads = advantages(rewards, scale=settings.scaling), deviations(rewards).tolist()
        mean_length = float(np.mean([len(each.ids) for group in groups for each in group]))
        found = list[Answer]()
        for row, (number, group) in enumerate(zip(numbers, groups)):
            prompt = self._texts.tokens[number]
            for column, each in enumerate(group):
                share, count = loss_weights(settings, len(each.ids), mean_length=mean_length)
                found.append(
                    Answer(
                        tokens=np.array((*prompt, *each.ids), np.int64),
                        prompt_length=len(prompt),
                        reward=rewards[row, column].item(),
                        spread=spreads[row],
                        advantage=scaled[row, column].item(),
                        loss_share=share,
                        loss_count=count,
                    )
                )
        return found

    def _with_scores(self, answers: Sequence[Answer], name: str, weights: ReferenceWeights | None) -> list[Answer]:
        """The answers with log-probabilities by the run's weights, or others, as ``name``. A collective."""
        run, length = self._run, self._run.config.data.seq_length
        table = torch.zeros(len(answers), length, dtype=torch.float64)
        size = run.config.training.global_batch_size
        batches = (
            self._microbatches(answers, range(first, first + size), key=first) for first in range(0, len(answers), size)
        )
        with self._objective.recording(table), nullcontext() if weights is None else weights.in_place():
            evaluate(run, batches)
        whole = all_reduce(table.to(run.context.device), run.context.mesh, "pp", "dp", "cp").cpu().numpy()
        found = list[Answer]()
        for each, row in zip(answers, whole):
            scores = row[each.prompt_length - 1 : len(each.tokens) - 1].copy()
            found.append(replace(each, old=scores) if name == "old" else replace(each, reference=scores))
        return found

    def _next_step(self) -> list[Microbatch]:
        size, number = self._run.config.training.global_batch_size, len(self._answers)
        times, start = divmod(self._taken * size, number)
        order = random_state(self._run.config.training.seed, self._made, times).permutation(number)
        found = self._microbatches(
            self._answers, order[start : start + size].tolist(), key=self._run.progress.consumed_samples
        )
        self._taken += 1
        if self._taken == self._steps:
            self._answers, self._taken = [], 0
        return found

    def _microbatches(self, answers: Sequence[Answer], numbers: Sequence[int], *, key: int) -> list[Microbatch]:
        """This rank's microbatches of some answers. ``key``: number of the first, for random streams."""
        run, mesh = self._run, self._run.context.mesh
        size, replicas, replica = run.config.training.micro_batch_size, mesh.size("dp"), mesh.rank("dp")
        return [
            run.data.microbatch(
                batch_of(answers, numbers[first : first + size], run.config.data.seq_length), StreamKey(key + first)
            )
            for first in range(replica * size, len(numbers), replicas * size)
        ]

    def _report(self, groups: Sequence[Sequence[Rated]], seconds: Mapping[str, float]) -> None:
        rewards = np.array([[np.nan if each.reward is None else each.reward for each in group] for group in groups])
        rated = rewards[~np.isnan(rewards)]
        spreads = deviations(torch.from_numpy(rewards)).numpy()
        answers = [each for group in groups for each in group]
        numbers = {
            "reward": float(rated.mean()) if len(rated) else 0.0,
            "reward_std": float(spreads.mean()),
            "frac_reward_zero_std": float((spreads == 0).mean()),
            "completions/mean_length": float(np.mean([len(each.ids) for each in answers])),
            "completions/clipped_ratio": float(np.mean([not each.has_ended for each in answers])),
        }
        spent = ", ".join(f"{name} {each:.2f} s" for name, each in seconds.items())
        unrated = len(answers) - len(rated)
        line = (
            f"answers {self._made} after iteration {self._run.progress.iteration}: reward {numbers['reward']:.4f} (in "
            f"groups +-{numbers['reward_std']:.4f}, all equal in {numbers['frac_reward_zero_std']:.0%}), "
            f"{numbers['completions/mean_length']:.1f} tokens ({numbers['completions/clipped_ratio']:.0%} cut off)"
            f"{f', {unrated} without a reward' if unrated else ''}; {spent}"
        )
        values = {f"answers/{name}": value for name, value in numbers.items()}
        times = {f"answers/{name}-seconds": value for name, value in seconds.items()}
        self._run.reporter.numbers(line, values | times, iteration=self._run.progress.iteration)
