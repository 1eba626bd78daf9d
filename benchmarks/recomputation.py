"""Memory of a GPU and time of a training step for each way to save memory: recomputation, offloading, fewer bits.

    python -m benchmarks.recomputation

Ways are --recompute-modules with each value, --cpu-offloading, --optimizer-cpu-offload and
--use-precision-aware-optimizer. The model has every part that a value of the first names: latent attention, a dense
layer, layers with experts and a shared one. Memory is what a rehearsal of 16 samples counts on a pretended GPU, beside
the estimate. Times are processor times of whole steps of one sample on the CPU, medians, as ratios to the step that
keeps everything: the two are processes of their own, and take turns. On a CPU main memory is the only one: rows of
what is offloaded show the time of the copies.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import argparse
import statistics
import subprocess
import time
from pathlib import Path
from typing import get_args

from benchmarks import results
from benchmarks.estimate import compared, tasks_of
from megatron.config.parse import parse_run
from megatron.config.run import RunConfig
from megatron.config.training import RecomputeModule
from megatron.core.models.registry import FAMILIES
from megatron.rehearsal.accelerator import unavailable

NOTHING = "nothing"
WAYS = {
    NOTHING: "",
    **{name: f"--recompute-granularity selective --recompute-modules {name}" for name in get_args(RecomputeModule)},
    "full": "--recompute-granularity full",
    "activations offloaded": "--cpu-offloading --min-offloaded-tensor-size 100000",
    "full, activations offloaded": "--recompute-granularity full --cpu-offloading --min-offloaded-tensor-size 100000",
    "optimizer offloaded": "--optimizer-cpu-offload",
    "moments in bf16": "--use-distributed-optimizer --use-precision-aware-optimizer --exp-avg-dtype bf16 "
    "--exp-avg-sq-dtype bf16",
}
_SAMPLES = 16  # of the step whose memory is counted; that which is timed has one
MODEL = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --num-layers 4 --hidden-size 512 --seq-length 1024 "
    "--num-attention-heads 8 --bf16 --swiglu "
    "--attention-dropout 0 --hidden-dropout 0 --lr 1e-4 --train-iters 1000 "
    "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--multi-latent-attention --q-lora-rank 192 --kv-lora-rank 128 "
    "--qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 64 --num-experts 8 --moe-router-topk 2 "
    "--moe-ffn-hidden-size 512 --moe-shared-expert-intermediate-size 512 --moe-layer-freq ([0]*1+[1]*3)"
)


def run_of(way: str, *, samples: int) -> RunConfig:
    """The model, trained in this way with steps of one microbatch."""
    batch = f"--micro-batch-size {samples} --global-batch-size {samples}"
    return parse_run([*MODEL.split(), *batch.split(), *WAYS[way].split()], extra_groups=FAMILIES["gpt"].groups)


def serve(way: str) -> None:
    """A way's process: for each line on stdin a step, answered with its processor time."""
    import torch

    from megatron.core.parallel.context import ParallelContext
    from megatron.training.run.data import TrainingData
    from megatron.training.run.run import build_run
    from megatron.training.step import train_step

    torch.set_num_threads(1)
    spec, context = FAMILIES["gpt"].train_spec, ParallelContext.single(dtype=torch.bfloat16)
    run = build_run(run_of(way, samples=1), spec, context)
    batches = TrainingData(run.config, spec, context, run.tokenizer).training_batches(0)
    for _ in sys.stdin:
        microbatches = next(batches)
        before = time.process_time()
        train_step(run, microbatches)
        print(time.process_time() - before, flush=True)


def started(way: str) -> subprocess.Popen[str]:
    """A process that serves ``way``."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    script = [sys.executable, __file__, "--serve", way]
    return subprocess.Popen(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def ratio(way: str, rounds: int) -> float:
    """Time of a step over that of one which keeps everything, in turns."""
    pair = started(NOTHING), started(way)
    seconds: tuple[list[float], list[float]] = [], []
    try:
        for number in range(rounds + 1):
            for process, taken in zip(pair, seconds):
                assert process.stdin is not None and process.stdout is not None
                print("step", file=process.stdin, flush=True)
                said = process.stdout.readline()
                taken += [float(said)] if number else []  # the first warms up
    finally:
        for process in pair:
            process.kill()
            process.wait()
    return statistics.median(seconds[1]) / statistics.median(seconds[0])


def main() -> None:
    """Print the table."""
    parser = results.parser_of(__doc__)
    parser.add_argument("ways", nargs="*", default=[*WAYS], metavar="WAY", help="all without one")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each way (default 5)")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = results.parse(parser, rounds=1, ways=["full"])
    ratios = {}
    if options.serve:
        serve(options.serve)
        return
    if unknown := {*options.ways} - {*WAYS}:
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(WAYS)}")
    if reason := unavailable():
        results.skip(options, reason)
        return
    tasks = {way: tasks_of(run_of(way, samples=_SAMPLES)) for way in dict.fromkeys([NOTHING, *options.ways])}
    found = {way: each for way, (each,) in compared(tasks).items()}
    print("| way | time | at most, MB | estimated | less, MB | estimated |")
    print("|---|--:|--:|--:|--:|--:|")
    for way, each in found.items():
        base = found[NOTHING]
        less = base.highest - each.highest, base.estimated_highest - each.estimated_highest
        sizes = (each.highest, each.estimated_highest, *less)
        columns = " | ".join(f"{size / 1e6:.0f}" for size in sizes)
        time_ratio = 1.0 if way == NOTHING else ratio(way, options.rounds)
        print(f"| {way} | {time_ratio:.2f} | {columns} |", flush=True)
        ratios[f"memory, {way}"] = max(each.share, 1 / each.share)
        ratios |= {} if way == NOTHING else {f"time, {way}": time_ratio}
    results.save(options, ratios, watched=[name for name in ratios if name.startswith("time")])


if __name__ == "__main__":
    main()
