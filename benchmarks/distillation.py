"""Time of a distillation step beside a plain training step and the teacher's forward pass.

    python -m benchmarks.distillation

The teacher is twice as deep and half as wide again as its student. Times are processor times of whole steps on the CPU
with one thread, medians of rounds in which all take turns. The bar is the step over the sum of a plain step and the
teacher's forward pass up to its hidden states: what the divergence itself costs is more than 1. A step that learns from
stored distributions is measured beside a plain one.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import results
from megatron.config.parse import parse_run
from megatron.config.run import RunConfig
from megatron.core.models.registry import FAMILIES
from megatron.core.parallel.context import ParallelContext
from megatron.training.checkpoints.loading import load
from megatron.training.checkpoints.saving import Saver
from megatron.training.run.run import Run, build_run
from megatron.training.step import train_step
from megatron.training.teacher_scoring import score

FLAGS = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 4095 --seq-length 256 --num-workers 0 --eval-iters 0 "
    "--micro-batch-size 2 --global-batch-size 2 --train-iters 12 --lr 1e-4 --lr-decay-style constant --swiglu "
    "--attention-dropout 0 --hidden-dropout 0 --normalization RMSNorm --position-embedding-type rope "
    "--disable-bias-linear --untie-embeddings-and-output-weights"
)
STUDENT = "--num-layers 4 --hidden-size 256 --num-attention-heads 4"
TEACHER = "--num-layers 8 --hidden-size 384 --num-attention-heads 6"
GPT = FAMILIES["gpt"]


def config_of(flags: str) -> RunConfig:
    """The run of a command line."""
    return parse_run(f"{FLAGS} {flags}".split(), extra_groups=GPT.groups)


def ready(flags: str) -> Run:
    """A run that has loaded what it starts from."""
    run = build_run(config_of(flags), GPT.train_spec, ParallelContext.single())
    load(run)
    return run


def stepping(run: Run) -> Callable[[], None]:
    """Takes the run's next step."""
    batches = run.data.training_batches(0)

    def step() -> None:
        train_step(run, next(batches))

    return step


def reading(run: Run) -> Callable[[], None]:
    """Runs the model of ``run`` up to its hidden states."""
    batches = run.data.training_batches(0)

    def read() -> None:
        with torch.no_grad():
            for microbatch in next(batches):
                run.train_spec.forward(run.models[0], {}, microbatch)

    return read


def measured(kinds: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Median processor seconds of each, in turns; the first round warms up."""
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(rounds + 1):
        for kind, work in kinds.items():
            before = time.process_time()
            work()
            seconds[kind] += [time.process_time() - before] if number else []
    return {kind: statistics.median(taken) for kind, taken in seconds.items()}


def main() -> None:
    """Print the table."""
    parser = results.parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="steps of each kind, at most 11 (default 7)")
    options = results.parse(parser, rounds=1)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        place, scores = f"{folder}/teacher", Path(folder) / "scores"
        teacher = build_run(config_of(f"{TEACHER} --save {place}"), GPT.train_spec, ParallelContext.single())
        Saver(teacher).save()
        taught = f"{STUDENT} --teacher-load {place}"
        quiet, context = lambda line: None, ParallelContext.single()
        score(config_of(taught), GPT.train_spec, context, scores, top_k=64, log_probs="float16", say=quiet)
        found = measured(
            {
                "plain step": stepping(ready(STUDENT)),
                "teacher's forward pass": reading(teacher),
                "distilled": stepping(ready(taught)),
                "distilled, half of the loss, temperature 2": stepping(
                    ready(f"{taught} --distill-share 0.5 --distill-temperature 2")
                ),
                "from 64 stored ids": stepping(ready(f"{STUDENT} --teacher-scores {scores}")),
            },
            options.rounds,
        )
    plain, forward = found["plain step"], found["teacher's forward pass"]
    print("| | ms | over a plain step and the teacher's forward pass |\n|---|--:|--:|")
    ratios = dict[str, float]()
    for kind, seconds in found.items():
        base = plain + (forward if kind.startswith("distilled") else 0.0)
        said = "" if kind in ("plain step", "teacher's forward pass") else f"{seconds / base:.2f}"
        ratios |= {kind: seconds / base} if said else {}
        print(f"| {kind} | {seconds * 1e3:.0f} | {said} |")
    results.save(options, ratios, watched=[*ratios])


if __name__ == "__main__":
    main()
