"""What zero-shot tasks share: they read files, load the model, and evaluate samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from torch import Tensor

from megatron.config.run import RunConfig
from megatron.core.inference.scoring import Sample, TextScore
from megatron.core.models.registry import family_of
from megatron.core.parallel.context import ParallelContext
from megatron.core.tokenizers.text_files import parse_line
from megatron.errors import DataError
from megatron.small_files import check_regular
from megatron.training.checkpoints.trained_model import TrainedModel, load_model
from megatron.training.evaluation.evaluate import Evaluator
from megatron.training.evaluation.metrics import Likelihoods
from megatron.training.reporting.progress import ProgressBar

_SECONDS_BETWEEN_LINES = 15.0


def read_text(path: Path) -> str:
    """All of a file of ``--valid-data``; raises DataError for one that cannot be read."""
    check_regular(path, where=f"--valid-data {path}", error=DataError)
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"--valid-data {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"--valid-data {path} is not UTF-8 (byte {error.start}); convert it first") from None


def json_lines(path: Path, *, key: str) -> Iterator[tuple[str, str]]:
    """Texts under ``key`` of a file's JSON lines, each after its file and line; DataError for a line without one."""
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            document = parse_line(line)
        except DataError as error:
            raise DataError(f"{where} is {error}") from None
        if not isinstance(document, dict) or not isinstance(document.get(key), str):
            raise DataError(f"{where} has no text under {key!r}")
        yield where, document[key]


def read_documents(path: Path, *, key: str) -> Iterator[str]:
    """Texts of a file: one for each line of .jsonl and .json, the whole file for other suffixes."""
    if path.suffix in (".jsonl", ".json"):
        yield from (text for _, text in json_lines(path, key=key))
    else:
        yield read_text(path)


def load_evaluator(config: RunConfig, context: ParallelContext) -> Evaluator[TrainedModel]:
    """An evaluator of the model that the settings name. A collective."""
    return Evaluator(load_model(config, family_of(config.extra).train_spec, context))


def likelihoods(evaluator: Evaluator[TrainedModel], samples: Sequence[Sample], *, compare: bool) -> Tensor:
    """A row for each sample: nats, wrong greedy predictions (with ``compare``), predictions. A collective."""
    progress = report_progress(evaluator.trained.context, len(samples))
    table = evaluator.evaluate(samples, Likelihoods(compare), progress=progress)
    assert table[:, 2].tolist() == [sample.num_scored for sample in samples], "every prediction is scored once"
    return table


def score(evaluator: Evaluator[TrainedModel], samples: Sequence[Sample]) -> TextScore:
    """The sum of the samples' scores. A collective."""
    nats, _, count = likelihoods(evaluator, samples, compare=False).sum(dim=0).tolist()
    return TextScore(nats, int(count))


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
