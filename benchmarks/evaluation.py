"""Evaluation against transformers doing the same windows, in one process that gives both the same threads.

    python benchmarks/evaluation.py

A random GPT-2 with the usual vocabulary scores a text in WikiText's overlapping windows, and predicts the last tokens
of samples of LAMBADA's lengths. Transformers enters twice: as one would write it (batches as they come, all logits),
and at its best (batches sorted by length, logits of the asked positions alone). Contenders take turns; printed are
medians of tokens read a second, and of the ratios of turns that followed each other.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import results

Score = Callable[[Sequence[Any]], float]


@dataclass(frozen=True)
class Shape:
    """Size of the model and of a batch."""

    layers: int
    hidden: int
    length: int
    batch: int
    threads: int


def models(shape: Shape, folder: Path) -> tuple[Any, Any]:
    """Transformers' model and ours with equal weights, from one conversion."""
    import transformers

    from megatron.config.parse import parse_run
    from megatron.core.conversion.convert import Conversion, convert
    from megatron.core.models.gpt.config import GROUPS as GPT_GROUPS
    from megatron.core.models.gpt.train_spec import GPTSpec
    from megatron.core.parallel.context import ParallelContext
    from megatron.training.checkpoints.loading import saved_config
    from megatron.training.checkpoints.trained_model import load_model
    from megatron.training.evaluation.evaluate import Evaluator
    from tasks.settings import TaskConfig

    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    sizes: dict[str, Any] = {"n_embd": shape.hidden, "n_layer": shape.layers, "n_head": shape.hidden // 64}
    theirs: Any = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_positions=shape.length, **sizes))
    theirs.eval()
    theirs.save_pretrained(folder / "hf")
    convert(Conversion("hf", folder / "hf", "megatron", folder / "native", skip_proof=True), say=lambda line: None)
    flags = f"--task LM --valid-data none --load {folder}/native --micro-batch-size {shape.batch}"
    config = parse_run(
        flags.split(),
        extra_groups=(TaskConfig, *GPT_GROUPS),
        checkpoint_config=saved_config,
        defaults={"use_checkpoint_args": True},
        world_size=1,
    )
    return theirs, Evaluator(load_model(config, GPTSpec(), ParallelContext.single()))


def samples_of_work(kind: str, shape: Shape, count: int) -> list[Any]:
    """``count`` windows of WikiText's rule over one text, or as many samples of LAMBADA's lengths; ids at random."""
    import numpy as np

    from megatron.core.inference.scoring import Sample, samples_of

    random = np.random.RandomState(1)
    if kind == "wikitext":
        ids = random.randint(50_000, size=shape.length + 32 * (count - 1) + 1).tolist()
        return list(samples_of(ids, length=shape.length, stride=32))
    # A log-normal with LAMBADA's mean of 86 tokens and tail up to 200 and more.
    lengths = np.clip(random.lognormal(4.4, 0.3, size=count).astype(int), 24, shape.length)
    return [Sample(random.randint(50_000, size=length + 1), first_scored=length - 1) for length in lengths.tolist()]


def by_us(model: Any, *, compare: bool) -> Score:
    """Score by ``Evaluator.evaluate``."""
    from megatron.training.evaluation.metrics import Likelihoods

    return lambda samples: float(model.evaluate(samples, Likelihoods(compare))[:, 0].sum())


def by_transformers(model: Any, shape: Shape, *, at_its_best: bool, compare: bool) -> Score:
    """Batches padded on the right, and log-probabilities picked from the logits."""
    import torch

    @torch.inference_mode()
    def score(samples: Sequence[Any]) -> float:
        total = 0.0
        order = sorted(samples, key=lambda sample: -sample.length) if at_its_best else samples
        for start in range(0, len(order), shape.batch):
            batch = order[start : start + shape.batch]
            longest = max(sample.length for sample in batch)
            tokens = torch.zeros(len(batch), longest + 1, dtype=torch.int64)
            wanted = torch.zeros(len(batch), longest, dtype=torch.bool)
            for row, sample in enumerate(batch):
                tokens[row, : sample.length + 1] = torch.from_numpy(sample.tokens)
                wanted[row, sample.first_scored : sample.length] = True
            first = int(wanted.any(dim=0).nonzero()[0]) if at_its_best else 0
            keep = torch.arange(first, longest)
            logits = model(tokens[:, :-1], logits_to_keep=keep, use_cache=False).logits[wanted[:, first:]]
            labels = tokens[:, 1:][wanted]
            if compare:
                (logits.argmax(-1) == labels).tolist()
            total -= logits.log_softmax(-1).gather(-1, labels[:, None]).double().sum().item()
        return total

    return score


def race(contenders: dict[str, Score], samples: Sequence[Any], rounds: int) -> dict[str, list[float]]:
    """Seconds of each turn; raises when two contenders find another sum."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    found: dict[str, float] = {}
    for turn in range(rounds + 1):
        for name, score in contenders.items():
            began = time.perf_counter()
            found[name] = score(samples)
            if turn:  # the first warms up
                seconds[name].append(time.perf_counter() - began)
    first = next(iter(found.values()))
    if any(abs(total - first) > 1e-4 * abs(first) for total in found.values()):
        raise SystemExit(f"the contenders disagree: {found}")
    return seconds


def report(kind: str, tokens: int, seconds: dict[str, list[float]]) -> dict[str, float]:
    """A line for each contender; our speed over that of each peer."""
    ours = seconds["megatron"]
    ratios: dict[str, float] = {}
    print(f"{kind}, {tokens:,} tokens read a turn")
    for name, times in seconds.items():
        ratio = statistics.median(theirs / mine for theirs, mine in zip(times, ours))
        print(f"  {name:<28} {tokens / statistics.median(times):>10,.0f} tokens/s   {ratio:5.2f} x our time")
        ratios |= {} if times is ours else {f"{kind}, {name}": ratio}
    return ratios


def main() -> None:
    """Measure both kinds of work with all contenders."""
    parser = results.parser_of(__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    asked = results.parse(parser, layers=1, hidden=64, length=128, samples=8, rounds=1)
    ratios: dict[str, float] = {}
    shape = Shape(asked.layers, asked.hidden, asked.length, asked.batch, asked.threads)

    import torch

    torch.set_num_threads(shape.threads)
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory() as folder:
        theirs, ours = models(shape, Path(folder))
    for kind, compare in (("wikitext", False), ("lambada", True)):
        samples = samples_of_work(kind, shape, asked.samples)
        contenders = {
            "megatron": by_us(ours, compare=compare),
            "transformers": by_transformers(theirs, shape, at_its_best=False, compare=compare),
            "transformers at its best": by_transformers(theirs, shape, at_its_best=True, compare=compare),
        }
        seconds = race(contenders, samples, asked.rounds)
        ratios |= report(kind, sum(sample.length for sample in samples), seconds)
    results.save(asked, ratios)


if __name__ == "__main__":
    main()
