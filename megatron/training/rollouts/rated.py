"""Answers of the model in training to prompts, with the rewards that a function of the user's gives them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatron.config.grpo import GRPOConfig
from megatron.core.datasets.prompts import PromptTexts
from megatron.core.inference.sampling import Sampling
from megatron.core.parallel.collectives import gather_objects
from megatron.core.parallel.mesh import Mesh
from megatron.errors import RESTART_CANNOT_HELP, ConfigError, ParallelError
from megatron.training.checkpoints.saving import Saver
from megatron.training.rollouts.generation import AnswerGenerator, Generated
from megatron.training.rollouts.rewards import RewardFunction
from megatron.training.run.run import Run


class RolloutError(ConfigError):
    """Answers that can't be generated or rated; raised on every rank."""


@dataclass(frozen=True)
class Rated:
    """An answer as ranks exchange it."""

    ids: tuple[int, ...]
    has_ended: bool
    reward: float | None


class Rater:
    """Lets the model of a run answer prompts, and the reward function rate the answers; every rank knows all of them.

    The process of the function ends with ``close``.
    """

    def __init__(self, run: Run, settings: GRPOConfig) -> None:
        """Make room for keys and values, and start the function. A collective; raises ConfigError on all ranks."""
        self._run, self._settings = run, settings
        self._generator = AnswerGenerator(
            run, longest=run.config.data.seq_length, most_tokens=settings.most_tokens, at_once=settings.at_once
        )
        self._rewards = self._started()

    def close(self) -> None:
        """End the process of the reward function."""
        if self._rewards is not None:
            self._rewards.close()

    def rated(
        self, texts: PromptTexts, numbers: Sequence[int], seeds: Sequence[int], *, each: int, sampling: Sampling
    ) -> tuple[list[list[Rated]], dict[str, float]]:
        """``each`` answers to each of the prompts with these numbers, and the seconds that generation and rewards took.
        A collective; raises RolloutError.
        """
        generator, mesh = self._generator, self._run.context.mesh
        mine, error, found, rating = generator.mine(len(numbers)), None, list[list[Rated]](), 0.0
        try:
            prompts = [texts.tokens[numbers[place]] for place in mine]
            groups = generator.answers(prompts, [seeds[place] for place in mine], each=each, sampling=sampling)
            start = time.perf_counter()
            if generator.is_first and groups:
                found = self._with_rewards(texts, [numbers[place] for place in mine], groups)
            rating = time.perf_counter() - start
        except ConfigError as raised:
            error = str(raised)
        gathered = gather_objects((dict(zip(mine, found)), error), mesh)
        if errors := [each for _, each in gathered if each is not None]:
            raise RolloutError(errors[0])
        everyone = {place: group for part, _ in gathered for place, group in part.items()}
        times = {"generation": generator.seconds, "rewards": rating}
        return [everyone[place] for place in range(len(numbers))], times

    def _started(self) -> RewardFunction | None:
        """The reward function, on the ranks that rate answers; raises ConfigError on all ranks."""
        found, error = None, None
        if self._generator.is_first:
            try:
                found = RewardFunction(self._settings.rewards)
            except ConfigError as raised:
                error = str(raised)
        if errors := [each for each in gather_objects(error, self._run.context.mesh) if each is not None]:
            raise RolloutError(errors[0])
        return found

    def _with_rewards(
        self, texts: PromptTexts, numbers: Sequence[int], groups: Sequence[Sequence[Generated]]
    ) -> list[list[Rated]]:
        """This rank's answers with their rewards; a call is about as many as are made at a time, at most."""
        assert self._rewards is not None
        found, most = list[list[Rated]](), max(1, self._settings.answers // len(groups[0]))
        for first in range(0, len(groups), most):
            part = groups[first : first + most]
            prompts = [
                texts.prompts[number] for number, group in zip(numbers[first : first + most], part) for _ in group
            ]
            answers = [each for group in part for each in group]
            completions: list[Any] = [
                [{"role": "assistant", "content": answer.text}] if prompt.is_conversation else answer.text
                for prompt, answer in zip(prompts, answers)
            ]
            rewards = iter(
                self._rewards(
                    prompts=[prompt.prompt for prompt in prompts],
                    completions=completions,
                    completion_ids=[answer.ids for answer in answers],
                    others={name: [prompt.fields[name] for prompt in prompts] for name in prompts[0].fields},
                )
            )
            found += [[Rated(each.ids, each.has_ended, next(rewards)) for each in group] for group in part]
        return found


@contextmanager
def kept_if_answers_fail(run: Run, saver: Saver, *, saved_at: int) -> Iterator[None]:
    """Save what has been learned where answers can't be generated or rated, which all ranks find."""
    try:
        yield
    except RolloutError:
        if run.config.checkpoint.save is not None and saved_at != run.progress.iteration:
            saver.save()
            saver.make_durable()
        raise


def check_ranks_read_the_same(texts: PromptTexts, mesh: Mesh) -> None:
    """Raise ParallelError where the files of some node hold other prompts than those of rank 0. A collective."""
    digests = gather_objects(texts.digest, mesh)
    if wrong := [rank for rank, each in enumerate(digests) if each != digests[0]]:
        raise ParallelError(
            f"rank {wrong[0]} reads other prompts than rank 0: {texts.flag} must be the same on every node; copy "
            "the files again",
            exit_code=RESTART_CANNOT_HELP,
        )
