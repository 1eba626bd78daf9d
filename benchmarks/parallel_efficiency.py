"""Two ranks of one thread against one rank of two threads at the same total work: parallel efficiency on a CPU.

    python -m benchmarks.parallel_efficiency --rounds 3           # all contenders
    python -m benchmarks.parallel_efficiency --rounds 3 experts   # those of this name

Contenders take turns, so that other work on the machine hits all alike; the efficiency is the ratio of median steps.
Beside it stand how often a rank waits for others in a step and how long (medians as well), the bytes that it sends, and
how long gloo takes for as many bytes in large messages: what it waits beyond that is latency, and ranks out of step.
"""

from __future__ import annotations

import os
import sys

from typing_extensions import override

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import contextlib
import dataclasses
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import results
from benchmarks.communication import counting
from megatron.config.parse import parse_run
from megatron.core.models.gpt.train_spec import GPTSpec
from megatron.core.models.registry import FAMILIES
from megatron.core.parallel.activity import Activity
from megatron.core.parallel.collectives import all_reduce, barrier
from megatron.core.parallel.context import ParallelContext
from megatron.training.run.run import build_run
from megatron.training.step import train_step
from tests.harness.ranks import run_ranks

MODEL = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 256 --micro-batch-size 1 --vocab-size 8191 "
    "--global-batch-size 8 --attention-dropout 0 --hidden-dropout 0 --mock-data --lr 1e-3 --train-iters 100 "
    "--num-workers 0 --eval-iters 0"
)
EXPERTS = (
    "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 512 --moe-aux-loss-coeff 0.01 --swiglu "
    "--disable-bias-linear"
)
CONTENDERS: dict[str, tuple[dict[str, Any], str]] = {
    "one rank, 2 threads": ({}, ""),
    "DP 2": ({"dp": 2}, ""),
    "DP 2, ZeRO 1": ({"dp": 2}, "--use-distributed-optimizer"),
    "TP 2": ({"tp": 2}, "--tensor-model-parallel-size 2"),
    "TP 2, SP": ({"tp": 2}, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "PP 2, 1F1B": ({"pp": 2}, "--pipeline-model-parallel-size 2"),
    "PP 2, ZB-V": ({"pp": 2}, "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v"),
    "CP 2": ({"cp": 2}, "--context-parallel-size 2"),
    "experts, one rank, 2 threads": ({}, EXPERTS),
    "experts, DP 2": ({"dp": 2}, EXPERTS),
    "experts, EP 2": ({"dp": 2, "ep": 2}, f"{EXPERTS} --expert-model-parallel-size 2"),
}


@dataclass
class TimedActivity(Activity):
    """Adds up what the rank waits for others. ``waits``: how often; ``waited``: seconds."""

    waits: int = 0
    waited: float = 0.0

    @contextlib.contextmanager
    @override
    def waiting(self, collective: str, group: Sequence[int]) -> Iterator[None]:  # type: ignore[override]
        """Time the block."""
        start = time.perf_counter()
        yield
        self.waits += 1
        self.waited += time.perf_counter() - start


@dataclass(frozen=True)
class Steps:
    """Measured steps of one rank: seconds of each step and how many of them it waited, waits and bytes sent in a step,
    bytes a second.
    """

    seconds: list[float]
    waited: list[float]
    waits: int
    sent: int
    bandwidth: float


def time_steps(context: ParallelContext, flags: str, steps: int) -> Steps:
    """Train ``steps`` steps with the clock running, after one that counts bytes."""
    ranks = context.mesh.world_size
    torch.set_num_threads(2 // ranks)
    given = [*MODEL.split(), *flags.split()]
    config = parse_run(given, world_size=ranks, extra_groups=FAMILIES["gpt"].groups)
    context = dataclasses.replace(context, sequence_parallel=config.parallel.sequence_parallel)
    activity = context.mesh.activity = TimedActivity()
    run = build_run(config, GPTSpec(), context, started=0.0)
    batches = run.data.training_batches(0)
    with counting(context.mesh) as sent:
        train_step(run, next(batches))
    seconds, waited = [], []
    for _ in range(steps):
        batch = next(batches)
        barrier(context.mesh)
        activity.waits, activity.waited = 0, 0.0
        start = time.perf_counter()
        train_step(run, batch)
        seconds.append(time.perf_counter() - start)
        waited.append(activity.waited)
    return Steps(seconds, waited, activity.waits, sent.total(), bandwidth(context))


def bandwidth(context: ParallelContext, size: int = 1 << 20) -> float:
    """Bytes a second that a rank sends in the fastest of some all-reduces."""
    if context.mesh.world_size == 1:
        return float("inf")
    tensor, seconds = torch.ones(size), []
    for _ in range(8):
        barrier(context.mesh)
        start = time.perf_counter()
        all_reduce(tensor, context.mesh, "pp", "dp", "cp", "tp")
        seconds.append(time.perf_counter() - start)
    return tensor.nbytes / min(seconds)


def main() -> None:
    """Time all contenders in turns and print the table."""
    parser = results.parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="in each round")
    parser.add_argument("names", nargs="*", help="parts of contenders' names; none: all contenders")
    options = results.parse(parser, rounds=1, steps=1, names=["one rank, 2 threads", "ZeRO 1"])
    names = [name for name in CONTENDERS if any(part in name for part in options.names or [""])]
    if not names:
        parser.error(f"no contender is called {' or '.join(options.names)}: there are {'; '.join(CONTENDERS)}")
    found: dict[str, list[Steps]] = defaultdict(list)
    for _ in range(options.rounds):
        for name in names:
            sizes, flags = CONTENDERS[name]
            found[name] += run_ranks(time_steps, flags, options.steps, timeout=300.0, reuse=False, **sizes)
    alone, ratios = 0.0, {}
    print("| | ms a step | efficiency | waits | ms waited | MiB sent by a rank | gloo's time for them alone, ms |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for name, ranks in found.items():
        step = statistics.median(second for each in ranks for second in each.seconds)
        if name.endswith("one rank, 2 threads"):
            alone = step
        elif alone:
            ratios[name] = alone / step
        waited = statistics.median(second for each in ranks for second in each.waited)
        waits, sent = max(each.waits for each in ranks), max(each.sent for each in ranks)
        fastest = max(each.bandwidth for each in ranks)
        print(
            f"| {name} | {1000 * step:.0f} | {alone / step:.2f} | {waits} | {1000 * waited:.0f} | "
            f"{sent / 2**20:.1f} | {1000 * sent / fastest:.0f} |"
        )
    results.save(options, ratios, watched=[name for name in ratios if "DP 2" not in name])


if __name__ == "__main__":
    main()
