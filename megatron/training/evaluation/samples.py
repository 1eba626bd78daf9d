"""Samples of what a model in training writes: continuations of a few prompts, at any layout."""

from __future__ import annotations

from megatron.core.inference.engine import Engine
from megatron.core.inference.request import Request, StopRules
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.scheduler import SchedulerOptions
from megatron.core.tokenizers.end_tokens import end_ids
from megatron.errors import ConfigError
from megatron.training.checkpoints.trained_model import model_in_training
from megatron.training.evaluation.evaluate import Evaluator
from megatron.training.evaluation.generating import engine_of_every_rank
from megatron.training.evaluation.whole_text_runner import WholeTextRunner
from megatron.training.run.run import Run


class Samples:
    """Continues the prompts of ``--generate-samples-prompts`` every ``--generate-samples-interval`` iterations.

    Sample ``n`` has the run's seed plus ``n``, so samples of different iterations differ by the weights alone.
    Constructor and ``write`` are collectives. Raises ConfigError for a model that continues no texts, and for a prompt
    that is as long as the model's texts.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._prompts = run, list[list[int]]()
        self._interval = run.config.reporting.generate_samples_interval
        if self._interval is None:
            return
        if not run.train_spec.continues_texts:
            raise ConfigError(
                f"--generate-samples-interval {self._interval}: a {run.train_spec.name} model continues no texts; "
                "leave the flag out"
            )
        tokenizer, texts = run.tokenizer, run.config.reporting.generate_samples_prompts
        start = tokenizer.eod if tokenizer.bos is None else tokenizer.bos
        self._prompts = [ids or [start] for ids in tokenizer.tokenize_batch(list(texts))] or [[start]]
        self._length = run.config.data.seq_length
        for text, ids in zip(texts, self._prompts):
            if len(ids) >= self._length:
                raise ConfigError(
                    f"--generate-samples-prompts {text[:40]!r} has {len(ids)} tokens, and --seq-length "
                    f"{self._length} leaves no room for a continuation: shorten it"
                )
        placed = model_in_training(run)
        longest = max(map(len, self._prompts)) + run.config.reporting.generate_samples_tokens
        engine = engine_of_every_rank(
            placed,
            length=min(self._length, longest),
            max_requests=len(self._prompts),
            options=SchedulerOptions(prefix_caching=False),  # keys and values of other weights
        )
        self._engine = engine or Engine(
            WholeTextRunner(Evaluator(placed), max_requests=len(self._prompts)), tokenizer=tokenizer
        )

    def write_if_due(self) -> None:
        """Report samples if the run's iteration is a multiple of the interval. A collective."""
        run, reporting = self._run, self._run.config.reporting
        if self._interval is None or run.progress.iteration % self._interval:
            return
        requests = [
            Request(
                id=f"sample {number}",
                prompt=tuple(prompt),
                max_tokens=min(reporting.generate_samples_tokens, self._length - len(prompt)),
                sampling=Sampling(temperature=reporting.generate_samples_temperature),
                stop=StopRules(token_ids=end_ids(run.tokenizer, run.chat)),
                seed=run.config.training.seed + number,
            )
            for number, prompt in enumerate(self._prompts)
        ]
        with run.reporter.aside("generate-samples"), run.evaluating():
            results = self._engine.generate(requests)
        prompts = reporting.generate_samples_prompts or ("",)
        continued = [(prompt, result.text) for prompt, result in zip(prompts, results)]
        run.reporter.samples(continued, iteration=run.progress.iteration)
