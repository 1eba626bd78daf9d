"""Time of a training step with guards over that of the same step without them.

    python -m benchmarks.guards [--rounds N]

Two runs of one model and data take steps in turns: a plain one, and one with spikes watched, results validated and
stragglers timed. Nothing is suspicious, so no step is computed twice. Seconds are of the processor; the ratio is the
median over rounds of the two runs' steps. What a step that is computed twice costs, and a test of the device before
training, is printed beside it.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from benchmarks import results
from megatron.config.parse import parse_run
from megatron.core.models.gpt.config import GROUPS as GPT_GROUPS
from megatron.core.models.gpt.train_spec import GPTSpec
from megatron.core.parallel.context import ParallelContext
from megatron.core.pipeline_parallel.chunk import Microbatch
from megatron.training.checkpoints.saving import Saver
from megatron.training.guards.guard import StepGuard
from megatron.training.guards.preflight import measure
from megatron.training.guards.stragglers import Timed, watching_stragglers
from megatron.training.reporting.metrics import StepRecord
from megatron.training.run.run import Run, build_run
from megatron.training.step import train_step

MODEL = (
    "--seq-length 128 --micro-batch-size 2 --global-batch-size 4 --vocab-size 1000 --mock-data --lr 1e-3 "
    "--train-iters 100000 --num-workers 0 --eval-iters 0 --num-attention-heads 4 --log-interval 10"
)
GUARDS = "--spike-action warn --spike-threshold 1e6 --rerun-mode validate_results --log-straggler"
Step = Callable[[Sequence[Microbatch]], StepRecord | None]


def build(flags: str) -> Run:
    """A run that no launcher has started."""
    config = parse_run(f"{MODEL} {flags}".split(), extra_groups=GPT_GROUPS)
    return build_run(config, GPTSpec(), ParallelContext.single())


def seconds_of(run: Run, step: Step, batches: Iterator[list[Microbatch]], timed: Timed, *, steps: int) -> float:
    """Seconds of the processor for some iterations as the loop takes them."""
    start = time.process_time()
    for _ in range(steps):
        with timed():
            step(next(batches))
        timed.report(run.progress.iteration)
    return time.process_time() - start


def main() -> None:
    """Take steps in turns and print their times."""
    parser = results.parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--hidden", type=int, default=256, help="width of the hidden states")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10, help="steps of a run in a round")
    options = results.parse(parser, rounds=3, hidden=64, layers=2, steps=3)
    torch.set_num_threads(1)
    sizes = f"--hidden-size {options.hidden} --num-layers {options.layers}"
    plain, guarded, replayed = build(sizes), build(f"{sizes} {GUARDS}"), build(f"{sizes} --check-replay-interval 1")
    guard, twice = StepGuard(guarded, Saver(guarded)), StepGuard(replayed, Saver(replayed))
    seconds: dict[str, list[float]] = {"plain": [], "guarded": [], "each step twice": []}
    with watching_stragglers(guarded) as timed:
        takers: dict[str, tuple[Run, Step, Timed]] = {
            "plain": (plain, lambda batch: train_step(plain, batch), Timed()),
            "guarded": (guarded, guard.step, timed),
            "each step twice": (replayed, twice.step, Timed()),
        }
        batches = {name: run.data.training_batches(0) for name, (run, _, _) in takers.items()}
        for number in range(options.rounds + 1):
            for name in sorted(takers, reverse=number % 2 == 0):
                run, step, around = takers[name]
                found = seconds_of(run, step, batches[name], around, steps=options.steps)
                seconds[name] += [found] if number else []  # the first round warms up
    ratios = {
        name: statistics.median(b / a for a, b in zip(seconds["plain"], seconds[name]))
        for name in ("guarded", "each step twice")
    }
    for name, each in seconds.items():
        print(f"{name:16} {1000 * statistics.median(each) / options.steps:8.2f} ms of the processor a step")
    print(
        f"a step with guards over a plain one: {ratios['guarded']:.4f}; computed twice: {ratios['each step twice']:.2f}"
    )
    start = time.perf_counter()
    measure(plain.context)
    print(f"the test of a device before training: {time.perf_counter() - start:.1f} s")
    results.save(options, ratios, watched=["each step twice"])


if __name__ == "__main__":
    main()
