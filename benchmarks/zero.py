"""A step of ZeRO 2 and 3 against ZeRO 1's, and against torch's FSDP2 on the same model: time, and peak memory.

    python -m benchmarks.zero --rounds 5

Two ranks of one thread and gloo, in turns, in fp32 with AdamW; times are medians. Memory: what the process holds in
main memory at most during the steps, beyond what it held before the model was built. FSDP2 wraps the same layers and
the same model with ``fully_shard``.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import ctypes
import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from benchmarks import results
from megatron.config.parse import parse_run
from megatron.core.models.gpt.config import GROUPS as GPT_GROUPS
from megatron.core.models.gpt.train_spec import GPTSpec
from megatron.core.parallel.collectives import barrier
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.model_context import ModelContext
from megatron.core.pipeline_parallel.chunk import LossSum, Microbatch
from megatron.core.tokenizers.build import build_tokenizer
from megatron.training.run.data import TrainingData
from megatron.training.run.run import build_run
from megatron.training.step import train_step
from tests.harness.ranks import run_ranks

MODEL = (
    "--seq-length 128 --micro-batch-size 2 --global-batch-size 4 --vocab-size 8191 --attention-dropout 0 "
    "--hidden-dropout 0 --mock-data --lr 1e-3 --train-iters 100 --num-workers 0 --eval-iters 0 --swiglu "
    "--untie-embeddings-and-output-weights --normalization RMSNorm --disable-bias-linear --position-embedding-type rope"
)
LARGE = "--num-layers 12 --hidden-size 512 --num-attention-heads 8"
SMALL = "--num-layers 2 --hidden-size 64 --num-attention-heads 4"
_OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
CASES = {
    "ZeRO 1": "--use-distributed-optimizer",
    "ZeRO 2": "--data-parallel-sharding-strategy optim_grads",
    "ZeRO 3": "--data-parallel-sharding-strategy optim_grads_params",
    "ZeRO 3, both overlaps": f"--data-parallel-sharding-strategy optim_grads_params {_OVERLAP}",
}
FSDP2 = "torch's FSDP2"


@dataclass(frozen=True)
class Measured:
    """Seconds of each step, and bytes of main memory at the peak beyond those at the start."""

    seconds: list[float]
    peak: int


def measure(context: ParallelContext, model: str, flags: str | None, steps: int) -> Measured:
    """Steps of one contender on this rank; ``flags`` None: FSDP2."""
    before = _resident("VmRSS")
    step = _ours(context, f"{MODEL} {model} {flags}") if flags is not None else _theirs(context, f"{MODEL} {model}")
    step()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the highest from here on
    seconds = []
    for _ in range(steps):
        barrier(context.mesh)
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return Measured(seconds, _resident("VmHWM") - before)


def _resident(field: str) -> int:
    """Bytes of this process in main memory, now (VmRSS) or at most (VmHWM)."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024


def _ours(context: ParallelContext, flags: str) -> Callable[[], object]:
    config = parse_run(flags.split(), world_size=context.mesh.world_size, extra_groups=GPT_GROUPS)
    run = build_run(config, GPTSpec(), context, started=0.0)
    batches = run.data.training_batches(0)
    return lambda: train_step(run, next(batches))


def _theirs(context: ParallelContext, flags: str) -> Callable[[], object]:
    """Steps of the same model and loss under FSDP2, with torch's fused AdamW; nothing but the model is ours."""
    config = parse_run(flags.split(), world_size=context.mesh.world_size, extra_groups=GPT_GROUPS)
    spec = GPTSpec()
    config = config.with_vocab_size(build_tokenizer(config.tokenizer).vocab_size)
    data = TrainingData(config, spec, context, build_tokenizer(config.tokenizer))
    model = spec.build_model(config.model, config.extra, ModelContext.plain(context), seed=1)
    mesh = DeviceMesh("cpu", [*range(context.mesh.world_size)])
    for layer in model.get_submodule("decoder.layers").children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batches = data.training_batches(0)

    def step() -> None:
        microbatches: Sequence[Microbatch] = next(batches)
        for microbatch in microbatches:
            loss = spec.loss(spec.forward(model, {}, microbatch), microbatch)
            assert isinstance(loss, LossSum)
            (loss.sum / loss.count).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    """Measure all contenders in turns and print the table."""
    parser = results.parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="in each round")
    parser.add_argument("--model", default=LARGE, help="flags of the model's size")
    options = results.parse(parser, rounds=1, steps=1, model=SMALL)
    found: dict[str, list[Measured]] = defaultdict(list)
    for _ in range(options.rounds):
        for name, flags in (*CASES.items(), (FSDP2, None)):
            found[name] += run_ranks(measure, options.model, flags, options.steps, timeout=300.0, reuse=False, dp=2)
    seconds = {name: statistics.median(one for rank in ranks for one in rank.seconds) for name, ranks in found.items()}
    peaks = {name: statistics.median(rank.peak for rank in ranks) for name, ranks in found.items()}
    print("| | ms a step | over ZeRO 1 | peak, MB | over FSDP2 |")
    print("|---|--:|--:|--:|--:|")
    for name in found:
        over, memory = seconds[name] / seconds["ZeRO 1"], peaks[name] / peaks[FSDP2]
        print(f"| {name} | {1000 * seconds[name]:.0f} | {over:.2f} | {peaks[name] / 1e6:.0f} | {memory:.2f} |")
    ratios = {f"{name}, time": seconds[name] / seconds["ZeRO 1"] for name in found if name != "ZeRO 1"}
    ratios |= {f"{name}, memory": peaks[name] / peaks[FSDP2] for name in found if name.startswith("ZeRO 3")}
    results.save(options, ratios, watched=[f"{FSDP2}, time"])


if __name__ == "__main__":
    main()
