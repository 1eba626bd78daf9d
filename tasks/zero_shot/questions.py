"""Requests of evaluation programs: likelihoods of continuations and whole texts, and generated continuations.

No answer depends on other requests, the batch size or the layout. Every rank makes the same requests and gets the same
answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from megatron.core.inference.engine import Engine
from megatron.core.inference.request import Request, StopRules
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.scoring import Sample
from megatron.core.tokenizers.end_tokens import end_ids
from megatron.errors import ConfigError, DataError
from megatron.training.checkpoints.trained_model import TrainedModel
from megatron.training.evaluation.evaluate import Evaluator
from megatron.training.evaluation.generating import engine_of_every_rank
from megatron.training.evaluation.metrics import Likelihoods
from megatron.training.evaluation.shared_out import of_all_ranks, own_share
from megatron.training.evaluation.whole_text_runner import WholeTextRunner


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Settings of a continuation: at most ``tokens`` tokens, up to the first string of ``until``."""

    tokens: int
    until: tuple[str, ...]
    sampling: Sampling

    @classmethod
    def of(cls, words: Mapping[str, Any]) -> Asked:
        """The request from the harness's normalized settings; ConfigError for those that are not supported."""
        rest = dict(words)
        until = tuple(end for end in rest.pop("until", ()) if end)
        tokens, samples = rest.pop("max_gen_toks"), rest.pop("do_sample", False)
        chosen = {name: rest.pop(name) for name in ("temperature", "top_k", "top_p") if name in rest}
        if rest:
            raise ConfigError(
                f"--gen_kwargs {', '.join(rest)}: only until, max_gen_toks, do_sample, temperature, top_k and top_p "
                "are supported; leave the others out"
            )
        return cls(tokens=tokens, until=until, sampling=Sampling(**chosen) if samples else Sampling(temperature=0.0))


class Questions:
    """Answers of a trained model; given texts are token ids, generated ones strings."""

    def __init__(self, trained: TrainedModel) -> None:
        self.tokenizer, self.length = trained.tokenizer, trained.config.data.seq_length
        self._trained, self._evaluator = trained, Evaluator(trained)
        self._ends = end_ids(trained.tokenizer, trained.chat)
        self._batch = trained.config.training.micro_batch_size * trained.context.mesh.size("dp")

    def likelihoods(self, samples: Sequence[Sample]) -> list[tuple[float, bool]]:
        """Log-likelihood of each sample's scored tokens, and whether greedy generation gives them. A collective."""
        rows = self._evaluator.evaluate(samples, Likelihoods(compare=True)).tolist()
        return [(-nats, missed == 0) for nats, missed, _ in rows]

    def of_whole_texts(self, texts: Sequence[list[int]], *, prefix: int) -> list[float]:
        """Log-likelihood of all tokens of each text, the first one given ``prefix``. A collective."""
        samples: list[Sample] = []
        owners: list[int] = []
        for owner, ids in enumerate(texts):
            cut = list(disjoint_windows(ids, prefix=prefix, length=self.length))
            samples += cut
            owners += [owner] * len(cut)
        totals = [0.0] * len(texts)
        for owner, (likelihood, _) in zip(owners, self.likelihoods(samples)):
            totals[owner] += likelihood
        return totals

    def continuations(self, prompts: Sequence[list[int]], numbers: Sequence[int], asked: Asked) -> list[str]:
        """Each prompt's continuation up to the first of its stop strings. A collective.

        ``numbers``: of the requests, which seed their random numbers. A prompt that is too long for the model's length
        loses its beginning; ConfigError when no prompt would fit.
        """
        room = self.length - asked.tokens
        if room < 1:
            raise ConfigError(
                f"{asked.tokens} tokens to generate leave no room for a text in the model's {self.length}: "
                "give fewer with --gen_kwargs max_gen_toks=N"
            )
        requests = [
            Request(
                id=str(number),
                prompt=tuple(prompt[-room:]),
                max_tokens=asked.tokens,
                sampling=asked.sampling,
                stop=StopRules(token_ids=self._ends, strings=asked.until),
                seed=self._trained.config.training.seed + number,
            )
            for prompt, number in zip(prompts, numbers)
        ]
        mesh = self._trained.context.mesh
        own = requests if self._cached_engine is None else requests[own_share(mesh)]
        answers = {each.request_id: (each.text, each.finish.error) for each in self._engine.generate(own)}
        if self._cached_engine is not None:
            answers = of_all_ranks(answers, mesh)
        for id, (_, error) in answers.items():
            if error is not None:
                raise DataError(f"request {id}: {error}")
        return [answers[request.id][0] for request in requests]

    @cached_property
    def _cached_engine(self) -> Engine | None:
        return engine_of_every_rank(self._trained, length=self.length, max_requests=self._batch)

    @cached_property
    def _engine(self) -> Engine:
        """Every rank has one, which answers the same requests as those of the ranks that it computes with."""
        runner = WholeTextRunner(self._evaluator, max_requests=self._batch)
        return self._cached_engine or Engine(runner, tokenizer=self.tokenizer)


def sample_of(context: list[int], continuation: list[int], *, length: int) -> Sample:
    """A continuation to score after as much of its context as fits into ``length`` tokens."""
    if len(continuation) > length:
        raise ConfigError(
            f"a continuation of {len(continuation)} tokens is longer than the {length} tokens that the model sees: "
            "leave the task out"
        )
    ids = (context + continuation)[-(length + 1) :]
    return Sample(np.array(ids), first_scored=len(ids) - 1 - len(continuation))


def disjoint_windows(ids: list[int], *, prefix: int, length: int) -> Iterator[Sample]:
    """Samples that score each token of a text once, ``length`` at a time; the last one reaches back to be as long.

    lm-evaluation-harness's windows of texts: the second and later ones have one token of context, the last has more.
    """
    tokens = np.array([prefix, *ids])
    for scored in range(0, len(ids), length):
        stop = min(scored + length, len(ids))
        start = max(0, stop - length)
        yield Sample(tokens[start : stop + 1], first_scored=scored - start)
