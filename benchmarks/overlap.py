"""Step time with and without each overlap flag, on links made slow: what is sent early must cost less.

    python -m benchmarks.overlap --latency-ms 5 --megabytes-per-second 50

Every asynchronous collective and message ends no earlier than latency + bytes/bandwidth after it started, one after the
other on a link. What still takes long with overlap is what nothing is left to hide behind.
"""

from __future__ import annotations

import os
import sys

from typing_extensions import override

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks import results
from megatron.config.parse import parse_run
from megatron.core.models.gpt.config import GROUPS as GPT_GROUPS
from megatron.core.models.gpt.train_spec import GPTSpec
from megatron.core.parallel import collectives
from megatron.core.parallel.collectives import Handle, barrier
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.transport import Transport
from megatron.training.run import run as run_module
from megatron.training.run.run import build_run
from megatron.training.step import train_step
from tests.harness.ranks import run_ranks

MODEL = (
    "--num-layers 8 --hidden-size 128 --num-attention-heads 4 --seq-length 256 --micro-batch-size 1 --vocab-size 1000 "
    "--global-batch-size 8 --attention-dropout 0 --hidden-dropout 0 --mock-data --lr 1e-3 --train-iters 100 "
    "--num-workers 0 --eval-iters 0 --ddp-bucket-size 200000"
)
_WHOLE = "--micro-batch-size 4"  # a single backward pass, in which all gradients come
_ZERO = f"{_WHOLE} --use-distributed-optimizer"
_ZERO_3 = f"{_WHOLE} --data-parallel-sharding-strategy optim_grads_params"
_PP = "--pipeline-model-parallel-size 2"
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "DP 2": ({"dp": 2}, _WHOLE),
    "DP 2, --overlap-grad-reduce": ({"dp": 2}, f"{_WHOLE} --overlap-grad-reduce"),
    "ZeRO 1": ({"dp": 2}, _ZERO),
    "ZeRO 1, --overlap-grad-reduce": ({"dp": 2}, f"{_ZERO} --overlap-grad-reduce"),
    "ZeRO 1, both, --overlap-param-gather": ({"dp": 2}, f"{_ZERO} --overlap-grad-reduce --overlap-param-gather"),
    "ZeRO 3": ({"dp": 2}, _ZERO_3),
    "ZeRO 3, --overlap-grad-reduce, --overlap-param-gather": (
        {"dp": 2},
        f"{_ZERO_3} --overlap-grad-reduce --overlap-param-gather",
    ),
    "PP 2, --no-overlap-p2p-communication": ({"pp": 2}, f"{_PP} --no-overlap-p2p-communication"),
    "PP 2, --overlap-p2p-communication": ({"pp": 2}, f"{_PP} --overlap-p2p-communication"),
    "interleaved, --no-overlap-p2p-communication": (
        {"pp": 2},
        f"{_PP} --num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication",
    ),
    "interleaved, --overlap-p2p-communication": ({"pp": 2}, f"{_PP} --num-virtual-stages-per-pipeline-rank 2"),
}

WITHOUT = {
    "DP 2, --overlap-grad-reduce": "DP 2",
    "ZeRO 1, --overlap-grad-reduce": "ZeRO 1",
    "ZeRO 1, both, --overlap-param-gather": "ZeRO 1",
    "ZeRO 3, --overlap-grad-reduce, --overlap-param-gather": "ZeRO 3",
    "PP 2, --overlap-p2p-communication": "PP 2, --no-overlap-p2p-communication",
    "interleaved, --overlap-p2p-communication": "interleaved, --no-overlap-p2p-communication",
}
"""A case with overlap: the same without."""


class Link:
    """A link of this rank: what starts on it waits for what is under way."""

    def __init__(self, latency: float, bandwidth: float) -> None:
        self._latency, self._bandwidth, self._free = latency, bandwidth, 0.0

    def start(self, size: int) -> float:
        """The time at which ``size`` bytes that leave now will have arrived."""
        self._free = max(time.monotonic(), self._free) + size / self._bandwidth
        return self._free + self._latency


def wait_until(moment: float) -> None:
    """Sleep, as a rank does whose link is slow."""
    time.sleep(max(0.0, moment - time.monotonic()))


def slow_handles(link: Link) -> type[Handle[Tensor]]:
    """Handles of collectives that end when the link says so."""

    class SlowHandle(Handle[Tensor]):
        def __init__(self, result: Tensor, works: Any = (), waiting: Any = None) -> None:
            super().__init__(result, works, waiting)
            self._arrival = link.start(result.nbytes) if works else 0.0

        @override
        def wait(self) -> Tensor:
            result = super().wait()
            wait_until(self._arrival)
            return result

    return SlowHandle


class _Late(Handle[Sequence[Tensor]]):
    """A message that carries the time of its arrival."""

    def __init__(self, transfer: Handle[Sequence[Tensor]], arrival: Tensor) -> None:
        self._transfer, self._arrival = transfer, arrival

    @override
    def wait(self) -> Sequence[Tensor]:
        tensors = self._transfer.wait()
        wait_until(self._arrival.item())
        return tensors


def slow_transports(link: Link) -> type[Transport]:
    """Pipeline messages that arrive when the sender's link says so, for both ends."""

    class SlowTransport(Transport):
        @override
        def send(self, tensors: Any, target: int) -> _Late:
            arrival = torch.tensor([link.start(sum(each.nbytes for each in tensors))], dtype=torch.float64)
            return _Late(super().send([arrival, *tensors], target), arrival)

        @override
        def receive(self, buffers: Any, source: int) -> _Late:
            arrival = torch.zeros(1, dtype=torch.float64)
            return _Late(super().receive([arrival, *buffers], source), arrival)

    return SlowTransport


def time_steps(context: ParallelContext, flags: str, steps: int, latency: float, bandwidth: float) -> list[float]:
    """Seconds of each step after the first, in which buckets learn what to wait for."""
    link = Link(latency, bandwidth)
    config = parse_run([*MODEL.split(), *flags.split()], world_size=context.mesh.world_size, extra_groups=GPT_GROUPS)
    handles = mock.patch.object(collectives, "Handle", slow_handles(link))
    transports = mock.patch.object(run_module, "Transport", slow_transports(link))
    seconds = []
    with handles, transports:
        run = build_run(config, GPTSpec(), context, started=0.0)
        batches = run.data.training_batches(0)
        train_step(run, next(batches))
        for _ in range(steps):
            batch = next(batches)
            barrier(context.mesh)
            start = time.perf_counter()
            train_step(run, batch)
            seconds.append(time.perf_counter() - start)
        run.optimizer.gather.finish()
    return seconds


def main() -> None:
    """Time all cases in turns on slow and on free links, and print the table."""
    parser = results.parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="in each round")
    parser.add_argument("--latency-ms", type=float, default=5.0)
    parser.add_argument("--megabytes-per-second", type=float, default=50.0)
    parser.add_argument("names", nargs="*", help="parts of cases' names; none: all cases")
    options = results.parse(parser, rounds=1, steps=1, names=["DP 2"])
    cases = {name: case for name, case in CASES.items() if any(part in name for part in options.names or [""])}
    if not cases:
        parser.error(f"no case is called {' or '.join(options.names)}: there are {'; '.join(CASES)}")
    slow = (options.latency_ms / 1000, options.megabytes_per_second * 1e6)
    seconds: dict[tuple[str, bool], list[float]] = defaultdict(list)
    for _ in range(options.rounds):
        for name, (sizes, flags) in cases.items():
            for is_slow, link in ((False, (0.0, float("inf"))), (True, slow)):
                found = run_ranks(time_steps, flags, options.steps, *link, timeout=300.0, reuse=False, **sizes)
                seconds[name, is_slow] += [max(each) for each in zip(*found)]
    print("| | free links, ms | slow links, ms | the links add |")
    print("|---|--:|--:|--:|")
    on_slow, ratios = {}, {}
    for name in cases:
        free, held = (1000 * statistics.median(seconds[name, is_slow]) for is_slow in (False, True))
        on_slow[name] = held
        print(f"| {name} | {free:.0f} | {held:.0f} | {held - free:.0f} |")
    for name, without in WITHOUT.items():
        if name in on_slow and without in on_slow:
            ratios[name] = on_slow[name] / on_slow[without]
    results.save(options, ratios)


if __name__ == "__main__":
    main()
