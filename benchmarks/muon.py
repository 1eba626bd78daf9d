"""CPU time of Muon's update of a model's matrices beside torch.optim.Muon's on the same weights.

    python -m benchmarks.muon [--rounds N]

torch's optimizer updates every matrix on every rank; here ranks share the matrices, so the ratio with the goal is that
of the busiest of 8 ranks, its exchanges included. The ratio of one rank is watched. Seconds are of the processor, since
the ranks share the machine's cores, and contenders take turns. The last table is arithmetic: Muon's part of a step.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import statistics
import time
from collections import defaultdict

import torch

from benchmarks import results
from megatron.config.optimizer import OptimizerConfig
from megatron.config.precision import PrecisionConfig
from megatron.core.distributed.buffers import build_buffers
from megatron.core.distributed.parameter_policy import parameter_policies
from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.low_precision import LowPrecision
from megatron.core.parallel.sharding import Sharding
from tests.harness.ranks import run_ranks

RANKS = 8
LR, DECAY = 1e-3, 0.1


def matrices(hidden: int, layers: int) -> list[torch.nn.Parameter]:
    """Weights of queries, keys, values, output, gate, up and down of each layer, the same on every rank."""
    generator, inner = torch.Generator().manual_seed(1), 8 * hidden // 3 // 64 * 64
    shapes = [(hidden, hidden)] * 4 + [(inner, hidden)] * 2 + [(hidden, inner)]
    return [torch.nn.Parameter(0.02 * torch.randn(shape, generator=generator)) for shape in shapes * layers]


def time_ours(context: ParallelContext, hidden: int, layers: int, steps: int) -> list[float]:
    """Seconds of this rank's processor in each of some updates of the matrices."""
    torch.set_num_threads(1)
    parameters = {f"layers.{number}.weight": each for number, each in enumerate(matrices(hidden, layers))}
    for parameter in parameters.values():
        parameter.sharding = Sharding(tuple(parameter.shape))  # type: ignore[attr-defined]
    config = OptimizerConfig(optimizer="muon", muon_nesterov=True, muon_coefficient_type="simple", clip_grad=0.0)
    policies = parameter_policies(parameters.items(), config)
    buffers = build_buffers(
        parameters.items(), context, grad_dtype=torch.float32, bucket_size=20 * hidden * hidden, policies=policies
    )
    low, precision = LowPrecision(), PrecisionConfig()
    optimizer = Optimizer(buffers, config, precision, context, low_precision=low, sharded=True)
    for buffer in buffers:
        buffer.grads.normal_(generator=torch.Generator().manual_seed(2))
    seconds = []
    for _ in range(steps + 1):
        start = time.process_time()
        optimizer.update(count=1.0, lr=LR, weight_decay=DECAY)
        seconds.append(time.process_time() - start)
    return seconds[1:]


def time_torch(context: ParallelContext, hidden: int, layers: int, steps: int) -> list[float]:
    """Seconds of the processor in each of some steps of torch's optimizer."""
    torch.set_num_threads(1)
    parameters = matrices(hidden, layers)
    optimizer = torch.optim.Muon(parameters, lr=LR, weight_decay=DECAY)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
    seconds = []
    for _ in range(steps + 1):
        start = time.process_time()
        optimizer.step()  # type: ignore[no-untyped-call]
        seconds.append(time.process_time() - start)
    return seconds[1:]


def main() -> None:
    """Time both in turns and print the tables."""
    parser = results.parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=512, help="width of the hidden states")
    parser.add_argument("--layers", type=int, default=8)
    options = results.parse(parser, rounds=1, hidden=128, layers=4)
    sizes = (options.hidden, options.layers, 2)
    found = defaultdict[str, list[float]](list)
    for _ in range(options.rounds):
        found["torch"] += run_ranks(time_torch, *sizes, timeout=300.0, reuse=False)[0]
        found["one rank"] += run_ranks(time_ours, *sizes, timeout=300.0, reuse=False)[0]
        ranks = run_ranks(time_ours, *sizes, dp=RANKS, timeout=300.0, reuse=False)
        found[f"busiest of {RANKS} ranks"] += [max(each) for each in zip(*ranks)]
    print("| | ms of the processor | over torch's |\n|---|--:|--:|")
    middle = {name: statistics.median(each) for name, each in found.items()}
    for name, seconds in middle.items():
        print(f"| {name} | {1000 * seconds:.1f} | {seconds / middle['torch']:.2f} |")
    print("\nFLOPs of an update of 5 steps over those of a step of 2 million tokens, undivided:")
    print("| hidden size | share |\n|--:|--:|")
    for hidden in (1024, 4096, 8192, 16384):
        print(f"| {hidden} | {100 * 5 * hidden / 2e6:.2f} % |")
    ratios = {name: seconds / middle["torch"] for name, seconds in middle.items() if name != "torch"}
    results.save(options, ratios, watched=["one rank"])


if __name__ == "__main__":
    main()
