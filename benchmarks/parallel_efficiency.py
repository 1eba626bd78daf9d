"""Two ranks of one thread against one rank of two threads at the same total work: parallel efficiency on a CPU.

    python -m benchmarks.parallel_efficiency --rounds 3

Contenders take turns, so that other work on the machine hits all alike; the efficiency is the ratio of median steps.
Beside it stand the bytes that a rank sends in a step and how long gloo takes for them alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections import defaultdict
from typing import Any

import torch

from benchmarks.communication import counting
from megatron.config.run import RunConfig
from megatron.core.parallel.collectives import all_reduce, barrier
from megatron.core.parallel.context import ParallelContext
from megatron.training.recipes.gpt import GPTRecipe
from megatron.training.run import build_run
from megatron.training.step import train_step
from tests.harness.ranks import run_ranks

MODEL = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 256 --micro-batch-size 1 --vocab-size 8191 "
    "--global-batch-size 8 --attention-dropout 0 --hidden-dropout 0 --mock-data --lr 1e-3 --train-iters 100 "
    "--num-workers 0 --eval-iters 0"
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
}


def time_steps(context: ParallelContext, flags: str, steps: int) -> tuple[list[float], int, float]:
    """Seconds of each step, bytes this rank sends in one, and gloo's bandwidth in bytes a second at 4 MiB."""
    ranks = context.mesh.world_size
    torch.set_num_threads(2 // ranks)
    config = RunConfig.parse([*MODEL.split(), *flags.split()], world_size=ranks)
    context = dataclasses.replace(context, sequence_parallel=config.parallel.sequence_parallel)
    run = build_run(config, GPTRecipe(), context, started=0.0)
    batches = run.data.training_batches(0)
    with counting(context.mesh) as sent:
        train_step(run, next(batches))
    seconds = []
    for _ in range(steps):
        batch = next(batches)
        barrier(context.mesh)
        start = time.perf_counter()
        train_step(run, batch)
        seconds.append(time.perf_counter() - start)
    return seconds, sent.total(), bandwidth(context)


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="in each round")
    options = parser.parse_args()
    seconds: dict[str, list[float]] = defaultdict(list)
    facts: dict[str, tuple[int, float]] = {}
    for _ in range(options.rounds):
        for name, (sizes, flags) in CONTENDERS.items():
            found = run_ranks(time_steps, flags, options.steps, timeout=300.0, **sizes)
            seconds[name] += [max(each) for each in zip(*(times for times, _, _ in found))]
            facts[name] = (max(sent for _, sent, _ in found), max(found[0][2], facts.get(name, (0, 0.0))[1]))
    alone = statistics.median(seconds["one rank, 2 threads"])
    print("| | ms a step | efficiency | MiB sent by a rank | gloo's time for them alone, ms |")
    print("|---|--:|--:|--:|--:|")
    for name, times in seconds.items():
        median, (sent, speed) = statistics.median(times), facts[name]
        print(
            f"| {name} | {1000 * median:.0f} | {alone / median:.2f} | {sent / 2**20:.1f} | {1000 * sent / speed:.0f} |"
        )


if __name__ == "__main__":
    main()
