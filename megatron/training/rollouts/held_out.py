"""Rewards of the model's answers to prompts that it doesn't learn from."""

from __future__ import annotations

import time

import numpy as np

from megatron.config.flags import plural_s
from megatron.config.grpo import GRPOConfig
from megatron.core.datasets.prompts import PromptTexts, check_same_fields, read_prompts
from megatron.core.inference.sampling import Sampling
from megatron.core.objectives.grpo import GRPOObjective
from megatron.training.reporting.metrics import Evaluation
from megatron.training.rollouts.generation import seed_of
from megatron.training.rollouts.rated import Rater, check_ranks_read_the_same
from megatron.training.run.run import Run


def evaluate_held_out(run: Run) -> None:
    """Evaluate a run that doesn't train on its held-out prompts, if it has any. A collective."""
    objective = run.train_spec
    if not isinstance(objective, GRPOObjective) or not objective.settings.grpo_eval_prompts:
        return
    rater = Rater(run, objective.settings)
    try:
        HeldOut(run, objective.settings, rater, learned=None).evaluate()
    finally:
        rater.close()


class HeldOut:
    """Answers each prompt of ``--grpo-eval-prompts`` once, and reports the mean reward.

    An answer depends on the weights, the seed and the prompt alone, so what differs between two evaluations does so by
    the weights. Nothing of a run's state is changed.
    """

    def __init__(
        self,
        run: Run,
        settings: GRPOConfig,
        rater: Rater,
        *,
        learned: PromptTexts | None,
        evaluated_at: int | None = None,
    ) -> None:
        """Read the prompts. ``learned``: those that are learned from. ``evaluated_at``: iteration of the last
        evaluation of a run that goes on. A collective; raises DataError for prompts.
        """
        self._run, self._settings, self._rater = run, settings, rater
        self.evaluated_at = evaluated_at
        longest = run.config.data.seq_length - settings.most_tokens
        self._texts = PromptTexts(
            read_prompts(settings.grpo_eval_prompts, flag="--grpo-eval-prompts"),
            run.tokenizer,
            run.chat,
            tokenizer_model=run.config.tokenizer.tokenizer_model,
            longest=longest,
            seed=run.config.training.seed,
            flag="--grpo-eval-prompts",
        )
        check_ranks_read_the_same(self._texts, run.context.mesh)
        if learned is not None:  # one function rates all
            check_same_fields([learned.prompts[0], self._texts.prompts[0]])
        number, known = len(self._texts.tokens), set() if learned is None else set(learned.tokens)
        shared = sum(each in known for each in self._texts.tokens)
        left_out = f", {self._texts.left_out:,} are left out, as they are longer" if self._texts.left_out else ""
        run.reporter.say(
            f"evaluating on {number:,} held-out prompt{plural_s(number)} of up to {longest} tokens{left_out}"
            f"{f'; {shared:,} of them are among those that are learned from' if shared else ''}; {self._how}"
        )

    @property
    def _how(self) -> str:
        temperature = self._settings.grpo_eval_temperature
        return f"answers sampled at temperature {temperature:g}" if temperature else "answers of the likeliest tokens"

    def evaluate_if_due(self) -> None:
        """Evaluate before the first step, every ``--eval-interval`` steps, and after the last; once at an iteration,
        so a run that goes on makes up for an evaluation that failed. A collective.
        """
        config, iteration = self._run.config, self._run.progress.iteration
        is_due = iteration % config.training.eval_interval == 0 or iteration == config.train_iters
        if is_due and self.evaluated_at != iteration:
            self.evaluate()

    def evaluate(self) -> None:
        """Report the mean reward and what the answers are like. A collective; raises RolloutError."""
        run, start = self._run, time.perf_counter()
        _, top_p, top_k = self._settings.sampling
        numbers, seed = range(len(self._texts.tokens)), run.config.training.seed
        with (
            run.reporter.aside("evaluate-time"),
            run.context.mesh.activity.during("generation of answers to held-out prompts"),
        ):
            groups, _ = self._rater.rated(
                self._texts,
                numbers,
                [seed_of(seed, -1, number) for number in numbers],
                each=1,
                sampling=Sampling(temperature=self._settings.grpo_eval_temperature, top_p=top_p, top_k=top_k),
            )
        answers = [answer for (answer,) in groups]
        rewards = [answer.reward for answer in answers if answer.reward is not None]
        totals = {
            "reward": (float(np.sum(rewards)), len(rewards)),
            "completions/mean_length": (sum(len(answer.ids) for answer in answers), len(answers)),
            "completions/clipped_ratio": (sum(not answer.has_ended for answer in answers), len(answers)),
        }
        run.reporter.validation(
            f"iteration {run.progress.iteration}",
            {name: total / max(1, count) for name, (total, count) in totals.items()},
            iteration=run.progress.iteration,
            consumed_samples=run.progress.consumed_samples,
            batches=f"held-out prompts: {len(answers)}"
            + (f", {len(answers) - len(rewards)} without a reward" if len(rewards) < len(answers) else ""),
        )
        self.evaluated_at = run.progress.iteration
        run.evaluated(run, {"": Evaluation(totals, time.perf_counter() - start)})
