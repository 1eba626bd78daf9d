"""What zero-shot tasks share: they read files, load the model, and evaluate samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from torch import Tensor
from tqdm import tqdm

from megatron.config.run import RunConfig
from megatron.core.inference.scoring import Sample, TextScore
from megatron.core.models.gpt.train_spec import GPTSpec
from megatron.core.parallel.context import ParallelContext
from megatron.core.tokenizers.text_files import parse_line
from megatron.errors import DataError
from megatron.training.evaluation.metrics import Likelihoods, LoadedModel, load_model
from megatron.training.reporting.progress import ProgressBar

_SECONDS_BETWEEN_WORDS = 15.0


def read_text(path: Path) -> str:
    """All of a file of ``--valid-data``; raises DataError for one that cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"--valid-data {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"--valid-data {path} is not UTF-8 (byte {error.start}); convert it first") from None


def json_lines(path: Path, *, key: str) -> Iterator[tuple[str, str]]:
    """Texts under ``key`` of a file's JSON lines, each with where it stands; DataError names file and line."""
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            yield f"{path}:{number}", _text_of(line, key, where=f"{path}:{number}")


def _text_of(line: str, key: str, *, where: str) -> str:
    try:
        document = parse_line(line)
    except DataError as error:
        raise DataError(f"{where} is {error}") from None
    if not isinstance(document, dict) or not isinstance(document.get(key), str):
        raise DataError(f"{where} has no text under {key!r}")
    return str(document[key])


def read_documents(path: Path, *, key: str) -> Iterator[str]:
    """Texts of a file: a line each of .jsonl and .json, the whole of any other."""
    if path.suffix in (".jsonl", ".json"):
        yield from (text for _, text in json_lines(path, key=key))
    else:
        yield read_text(path)


def load_gpt(config: RunConfig, context: ParallelContext) -> LoadedModel:
    """The causal language model that the settings name. A collective."""
    return load_model(config, GPTSpec(), context)


def likelihoods(model: LoadedModel, samples: Sequence[Sample], *, compare: bool) -> Tensor:
    """Of each sample: nats, predictions that another token beats (with ``compare``), predictions. A collective."""
    table = model.evaluate(samples, Likelihoods(compare), progress=_teller(model.context, len(samples)))
    wanted = [sample.num_scored for sample in samples]
    assert table[:, 2].tolist() == wanted, "every prediction is scored once"
    return table


def score(model: LoadedModel, samples: Sequence[Sample]) -> TextScore:
    """The samples' scores added up. A collective."""
    nats, _, count = likelihoods(model, samples, compare=False).sum(dim=0).tolist()
    return TextScore(nats, int(count))


def _teller(context: ParallelContext, total: int) -> Callable[[int], None]:
    """Says on the last rank how far reading has come: in a line on a terminal, else now and then."""
    start = said = time.monotonic()
    is_last = context.mesh.world_rank == context.mesh.world_size - 1
    bar = ProgressBar(total, enabled=is_last)

    def tell(done: int) -> None:
        nonlocal said
        now = time.monotonic()
        bar.show(done, "samples")
        if done == total:
            bar.clear()
        elif is_last and not bar.enabled and now - said > _SECONDS_BETWEEN_WORDS:
            said = now
            print(
                f"  {done:,} of {total:,} samples, {tqdm.format_interval((now - start) * (total - done) / done)} left",
                flush=True,
            )

    return tell
