"""Answers to prompts by the model that a run trains, with the weights that it has now."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.inference.engine import Engine
from megatron.core.inference.request import Request, Result, StopRules
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.scheduler import SchedulerOptions
from megatron.core.parallel.rng import derive_seed
from megatron.core.tokenizers.end_tokens import end_ids
from megatron.errors import ConfigError
from megatron.training.checkpoints.trained_model import model_in_training
from megatron.training.evaluation.generating import runner_of_every_rank, text_needs
from megatron.training.run.run import Run


@dataclass(frozen=True)
class Generated:
    """An answer: ``ids`` with the token that ended it, its ``text`` without, and whether it ended by itself."""

    ids: tuple[int, ...]
    text: str
    has_ended: bool


class AnswerGenerator:
    """Generates answers on the ranks of a run, each data-parallel rank those to its own prompts.

    Weights are those in the run's memory, so nothing is copied. Ranks that share experts generate all answers, since
    each step of such a model is a collective of theirs.
    """

    def __init__(self, run: Run, *, longest: int, most_tokens: int, at_once: int) -> None:
        """Make room for ``at_once`` texts of ``longest`` tokens, ``most_tokens`` of an answer. A collective.

        Raises ConfigError for a model that can't generate with a cache.
        """
        self._run, self._most_tokens = run, most_tokens
        placed = model_in_training(run)
        runner = runner_of_every_rank(placed, length=longest, max_requests=at_once)
        if runner is None:
            raise ConfigError(
                f"--perform-rl-step: layers with {', '.join(text_needs(placed).unknown)} don't say what they keep of a "
                "text (text_state), so answers would be read again for each token: give the module a text_state "
                "(docs/adding_a_family.md, Generation)"
            )
        self._runner, self._ends = runner, end_ids(run.tokenizer, run.chat)
        mesh = run.context.mesh
        self._replicas = 1 if mesh.size("ep") > 1 else mesh.size("dp")
        self._replica = 0 if self._replicas == 1 else mesh.rank("dp")
        self.is_first = mesh.rank("tp", "pp", "cp") == 0 and (self._replicas > 1 or mesh.rank("dp") == 0)
        self.seconds = 0.0

    def mine(self, count: int) -> range:
        """Which of ``count`` prompts this rank's replica answers."""
        return range(self._replica, count, self._replicas)

    def answers(
        self, prompts: Sequence[tuple[int, ...]], seeds: Sequence[int], *, each: int, sampling: Sampling
    ) -> list[list[Generated]]:
        """``each`` answers to each prompt. A collective of a replica's ranks. ``seeds``: of the prompts; an answer is a
        function of the weights, its prompt, its seed and its number. ``sampling``: how tokens are chosen.

        Raises ConfigError where the model's logits are not finite.
        """
        start = time.perf_counter()
        requests = [
            Request(
                id=f"{number} {choice}",
                prompt=prompt,
                max_tokens=self._most_tokens,
                sampling=sampling,
                stop=StopRules(token_ids=self._ends),
                seed=seed,
                choice=choice,
            )
            for number, (prompt, seed) in enumerate(zip(prompts, seeds))
            for choice in range(each)
        ]
        # An engine of its own: its cache knows prompts by their tokens, and the weights have changed.
        engine = Engine(self._runner, options=SchedulerOptions(prefix_caching=not self._runner.limits.has_states))
        with self._run.evaluating():
            results = engine.generate(requests)
        self.seconds = time.perf_counter() - start
        found = [self._generated(result) for result in results]
        return [found[first : first + each] for first in range(0, len(found), each)]

    def _generated(self, result: Result) -> Generated:
        if result.finish.reason == "error":
            raise ConfigError(
                f"an answer couldn't be generated: {result.finish.error}; the learning rate may be too high"
            )
        ids, hidden = tuple(token.id for token in result.tokens), self._run.tokenizer.special_ids
        text = self._run.tokenizer.detokenize([each for each in result.ids if each not in hidden])
        return Generated(ids, text, result.finish.reason == "stop")


def seed_of(seed: int, rollout: int, prompt: int) -> int:
    """The seed of the answers to a prompt, by its number, in a rollout."""
    return derive_seed(seed, "rollout", rollout, prompt)
