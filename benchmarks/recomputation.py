"""Peak memory and time of a training step for each value of --recompute-modules, and with --cpu-offloading, on the CPU.

    python -m benchmarks.recomputation

The model has every part that a value names: latent attention, a dense layer, layers with experts and a shared one. Each
way has a process of its own, so that peak memory is its own, and they take turns; times are processor times, medians,
as ratios to the step that keeps everything. Beside them stands what the estimate says is kept. On a CPU main memory
is the only one, so what is offloaded doesn't leave the process: that row shows the time of the copies.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import argparse
import json
import resource
import statistics
import subprocess
import time
from pathlib import Path
from typing import IO, get_args

from megatron.config.training import RecomputeModule

NOTHING = "nothing"
WAYS = {
    NOTHING: "",
    **{name: f"--recompute-granularity selective --recompute-modules {name}" for name in get_args(RecomputeModule)},
    "full": "--recompute-granularity full",
    "offloaded": "--cpu-offloading --min-offloaded-tensor-size 100000",
    "full, offloaded": "--recompute-granularity full --cpu-offloading --min-offloaded-tensor-size 100000",
}
MODEL = (
    "--mock-data --vocab-size 1000 --num-layers 6 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --bf16 "
    "--micro-batch-size 2 --attention-dropout 0 --hidden-dropout 0 --lr 1e-4 --train-iters 1 --swiglu "
    "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--multi-latent-attention --q-lora-rank 192 --kv-lora-rank 128 "
    "--qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 64 --num-experts 8 --moe-router-topk 2 "
    "--moe-ffn-hidden-size 512 --moe-shared-expert-intermediate-size 512 --moe-layer-freq ([0]*2+[1]*4)"
)


def serve(way: str) -> None:
    """A way's process: for each line on stdin a step, answered with its time, memory and what the estimate says."""
    import torch

    from megatron.core.distributed.buffers import build_buffers
    from megatron.core.distributed.grad_sync import GradSync
    from megatron.core.models.registry import family_of
    from megatron.core.parallel.context import ParallelContext
    from megatron.core.transformer.block import RecomputePlan
    from megatron.planning.estimate import stage_costs
    from megatron.training.pretrain import parse_any_family

    torch.set_num_threads(1)
    run = parse_any_family([*MODEL.split(), *WAYS[way].split(), "--dry-run"], prog="recomputation.py")
    train_spec, context = family_of(run.extra).train_spec, ParallelContext.single(dtype=torch.bfloat16)
    model = train_spec.build_model(run.model, run.extra, context, recompute=RecomputePlan.of(run.training)).train()
    buffers = build_buffers(model.named_parameters(), context, grad_dtype=torch.float32)
    sync = GradSync(buffers, context, sharded=False, overlap=False)
    shape = run.training.micro_batch_size, run.data.seq_length
    tokens = torch.randint(1000, shape, generator=torch.Generator().manual_seed(1))
    (kept,) = (costs.kept for costs in stage_costs(run, train_spec))
    for _ in sys.stdin:
        before = time.process_time()
        sync.zero()
        model(tokens).cross_entropy(tokens, torch.full(shape, 1 / tokens.numel())).backward()
        sync.finish()
        seconds, peak = time.process_time() - before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"seconds": seconds, "peak": peak, "kept": kept / 2**20}), flush=True)


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="steps of each way (default 5)")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    started = {
        way: subprocess.Popen(
            [sys.executable, __file__, "--serve", way],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )
        for way in WAYS
    }  # fmt: skip
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    last: dict[str, dict[str, float]] = {}
    try:
        for number in range(options.rounds + 1):
            for way, process in started.items():
                assert process.stdin is not None and process.stdout is not None
                last[way] = _step(process.stdin, process.stdout)
                if number:  # the first warms up
                    seconds[way].append(last[way]["seconds"])
    finally:
        for process in started.values():
            process.kill()
            process.wait()
    print(f"{'recomputed':18}{'time':>7}{'peak MiB':>10}{'less':>7}{'estimated less':>16}")
    base, usual = last[NOTHING], statistics.median(seconds[NOTHING])
    for way, found in last.items():
        less = f"{base['peak'] - found['peak']:7.0f}{base['kept'] - found['kept']:16.0f}"
        print(f"{way:18}{statistics.median(seconds[way]) / usual:7.2f}{found['peak']:10.0f}{less}")


def _step(given: IO[str], answers: IO[str]) -> dict[str, float]:
    print("step", file=given, flush=True)
    answer: dict[str, float] = json.loads(answers.readline())
    return answer


if __name__ == "__main__":
    main()
