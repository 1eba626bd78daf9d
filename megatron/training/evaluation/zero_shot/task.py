"""What zero-shot tasks have in common: they turn files into samples, and rows of numbers into scores."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from torch import Tensor

from megatron.core.inference.scoring import Sample
from megatron.core.parallel.context import ParallelContext
from megatron.core.tokenizers.base import Tokenizer
from megatron.training.checkpoints.trained_model import PlacedModel
from megatron.training.evaluation.evaluate import Evaluator
from megatron.training.evaluation.metrics import Likelihoods
from megatron.training.evaluation.zero_shot.files import FLAG
from megatron.training.reporting.progress import ProgressBar

_SECONDS_BETWEEN_LINES = 15.0


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a task measures on.

    ``files``: those that ``flag`` names. ``stride``: of windows, in tokens; None: the task's.
    ``whole_word``: whether LAMBADA's whole last word must be predicted. ``json_key``: where a JSON line has its text.
    """

    files: tuple[Path, ...]
    flag: str = FLAG
    stride: int | None = None
    whole_word: bool = False
    json_key: str = "text"


@dataclass(frozen=True)
class Scores:
    """Scores of a task. ``line``: as Megatron-LM prints them. ``metrics``: the same numbers by name."""

    line: str
    metrics: Mapping[str, float]


class ZeroShotTask(Protocol):
    """A task of a model as it is: its constructor reads files and raises DataError for those that don't fit.

    ``shown``: the metrics that are worth a curve. ``compares``: whether predictions are compared with the text.
    """

    shown: ClassVar[tuple[str, ...]]
    compares: ClassVar[bool]

    def samples(self, tokenizer: Tokenizer, *, length: int) -> Sequence[Sample]:
        """What to score, in windows of at most ``length`` tokens. Raises DataError for texts that can't be scored."""

    def scores(self, table: Tensor) -> Scores:
        """The scores from a row for each sample: nats, wrong greedy predictions, predictions."""


def likelihoods(
    evaluator: Evaluator[PlacedModel], samples: Sequence[Sample], *, compare: bool, reports: bool = True
) -> Tensor:
    """A row for each sample: nats, wrong greedy predictions (with ``compare``), predictions. A collective.

    ``reports``: show how many are done.
    """
    progress = report_progress(evaluator.trained.context, len(samples)) if reports else lambda done: None
    table = evaluator.evaluate(samples, Likelihoods(compare), progress=progress)
    assert table[:, 2].tolist() == [sample.num_scored for sample in samples], "every prediction is scored once"
    return table


def report_progress(context: ParallelContext, total: int) -> Callable[[int], None]:
    """Reports on the last rank how many of ``total`` samples are done: a bar on a terminal, else a line at times."""
    is_last = context.mesh.world_rank == context.mesh.world_size - 1
    bar, printed_at = ProgressBar(total, enabled=is_last), time.monotonic()

    def report(done: int) -> None:
        nonlocal printed_at
        bar.show(done, "samples")
        if done == total:
            bar.clear()
        elif is_last and not bar.enabled and time.monotonic() - printed_at > _SECONDS_BETWEEN_LINES:
            printed_at = time.monotonic()
            print(f"  {done:,} of {total:,} samples, {bar.time_left(done)}", flush=True)

    return report
