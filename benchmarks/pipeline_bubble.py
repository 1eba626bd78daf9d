"""Measured against simulated bubbles of every pipeline schedule, with stages that sleep instead of computing.

Sleeping ranks don't compete for cores, so two of them show what many would: what is left is the schedule, and what the
runner and the transfers add to it. Every rank is a process; messages are real, over gloo.

    python benchmarks/pipeline_bubble.py --ranks 4 --microbatches 8 --stage-ms 100

``--link-ms`` makes every message arrive that much later, and ``--no-overlap`` makes both ends wait for it.
"""

from __future__ import annotations

import dataclasses
import os
import sys

from typing_extensions import override

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks import results
from megatron.config.parallel import PipelineScheduleName
from megatron.core.parallel.collectives import Handle
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.rng import RngStreams, StreamKey
from megatron.core.parallel.transport import Transport
from megatron.core.parallel.weight_gradients import WeightGradients
from megatron.core.pipeline_parallel.chunk import LossSum, Microbatch, StageInputs, TensorSpec
from megatron.core.pipeline_parallel.runner import Runner
from megatron.core.pipeline_parallel.settings import PipelineSettings
from megatron.core.pipeline_parallel.simulate import Durations, simulate
from megatron.training.run.pipeline import Plans, routes

SCHEDULES: list[tuple[PipelineScheduleName, int]] = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 4),
    ("zb-h1", 1),
    ("zb-v", 2),
]


@dataclass(frozen=True)
class Job:
    """Settings that every rank gets. ``stage_ms``: forward pass of a rank's whole part for one microbatch; ``link_ms``:
    delay of a message.
    """

    ranks: int
    microbatches: int
    stage_ms: float
    link_ms: float
    steps: int
    overlap: bool
    elements: int
    folder: str


class _Sleep(torch.autograd.Function):
    """Sleeps forward, and backward once for the gradients of inputs and once, now or later, for those of weights."""

    @staticmethod
    @override
    def forward(ctx: Any, x: torch.Tensor, seconds: float, gradients: WeightGradients) -> torch.Tensor:
        ctx.seconds, ctx.gradients = seconds, gradients
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    @override
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.seconds)
        if ctx.gradients.noted is not None:
            seconds = ctx.seconds
            ctx.gradients.noted.append(lambda: time.sleep(seconds))
        else:
            time.sleep(ctx.seconds)
        return grad, None, None


class _Late(Handle[Sequence[torch.Tensor]]):
    """A transfer that isn't over before ``delay`` seconds have passed since it was sent."""

    def __init__(self, transfer: Handle[Sequence[torch.Tensor]], sent: torch.Tensor, delay: float) -> None:
        self._transfer, self._left_at, self._delay = transfer, sent, delay

    @override
    def wait(self) -> Sequence[torch.Tensor]:
        tensors = self._transfer.wait()
        time.sleep(max(0.0, self._left_at.item() + self._delay - time.monotonic()))
        return tensors


class SlowTransport(Transport):
    """Messages that carry the time at which they were sent, and are held back."""

    delay = 0.0

    @override
    def send(self, tensors: Sequence[torch.Tensor], target: int) -> _Late:
        sent = torch.tensor([time.monotonic()], dtype=torch.float64)
        return _Late(super().send([sent, *tensors], target), sent, self.delay)

    @override
    def receive(self, buffers: Sequence[torch.Tensor], source: int) -> _Late:
        sent = torch.zeros(1, dtype=torch.float64)
        return _Late(super().receive([sent, *buffers], source), sent, self.delay)


class SleepingStage:
    """A stage that takes time and nothing else."""

    def __init__(
        self, spec: TensorSpec, seconds: float, gradients: WeightGradients, *, first: bool, last: bool
    ) -> None:
        self.incoming: Mapping[str, TensorSpec] = {} if first else {"x": spec}
        self._spec, self._seconds, self._gradients, self._last = spec, seconds, gradients, last

    def __call__(self, stage_inputs: StageInputs, microbatch: Microbatch) -> StageInputs | LossSum:
        x = stage_inputs["x"] if stage_inputs else torch.zeros(self._spec.shape).requires_grad_()
        x = _Sleep.apply(x, self._seconds, self._gradients)  # type: ignore[no-untyped-call]
        return LossSum.single("loss", x.sum(), torch.tensor(1.0)) if self._last else {"x": x}


def main() -> None:
    """Run every schedule and print the table."""
    parser = results.parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--stage-ms", type=float, default=20.0, help="forward pass of a rank's part of the model")
    parser.add_argument("--link-ms", type=float, default=0.0, help="delay of every message")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--elements", type=int, default=1 << 16, help="fp32 numbers in a message")
    parser.add_argument("--no-overlap", action="store_true", help="both ends wait for every message")
    options = results.parse(parser, ranks=2, microbatches=4, stage_ms=4.0, steps=1)
    with tempfile.TemporaryDirectory() as folder:
        job = Job(
            ranks=options.ranks,
            microbatches=options.microbatches,
            stage_ms=options.stage_ms,
            link_ms=options.link_ms,
            steps=options.steps,
            overlap=not options.no_overlap,
            elements=options.elements,
            folder=folder,
        )
        spawn(run_rank, args=(job,), nprocs=job.ranks)  # type: ignore[no-untyped-call]
        ratios = report(job)
    results.save(options, ratios)


def run_rank(rank: int, job: Job) -> None:
    """Time every schedule on this rank; rank 0 writes the medians down."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{job.folder}/meet", rank=rank, world_size=job.ranks)
    mesh, device = Mesh.of(pp=job.ranks, rank=rank), torch.device("cpu")
    for name, chunks in SCHEDULES:
        context = ModelContext(mesh=mesh, rng=RngStreams(1, mesh, device), device=device, dtype=torch.float32)
        seconds = time_schedule(context, job, PipelineSettings(name, job.ranks, chunks, None, job.overlap))
        if rank == 0:
            (Path(job.folder) / f"{name} {chunks}").write_text(str(statistics.median(seconds)))
    dist.destroy_process_group()


def time_schedule(context: ModelContext, job: Job, settings: PipelineSettings) -> list[float]:
    """Seconds of each step, from when all ranks are there to when all have finished."""
    context = dataclasses.replace(context, weight_gradients=WeightGradients(may_wait=settings.splits_backward))
    placement, spec = settings.placement, TensorSpec((job.elements,), torch.float32)
    stages = [
        SleepingStage(
            spec,
            job.stage_ms / 1000 / settings.num_chunks,
            context.weight_gradients,
            first=stage == 0,
            last=stage == placement.num_stages - 1,
        )
        for stage in placement.stages_of(context.mesh.rank("pp"))
    ]
    transport = SlowTransport(context.mesh, context.device, routes=routes(placement))
    transport.delay = job.link_ms / 1000
    runner = Runner(stages, transport=transport, weight_gradients=context.weight_gradients)
    plan = Plans(settings, context.mesh.rank("pp")).training(job.microbatches)
    batch = [Microbatch({}, StreamKey(number)) for number in range(job.microbatches)]
    taken = []
    for _ in range(job.steps + 1):
        dist.barrier()
        start = time.perf_counter()
        runner.step(plan, batch)
        dist.barrier()
        taken.append(time.perf_counter() - start)
    return taken[1:]  # the first step makes connections


def report(job: Job) -> dict[str, float]:
    """One row a schedule: bubble by the simulator and by the clock, and how much faster than 1F1B a step is.

    Returns the measured time of each over the simulated one.
    """
    ratios = {}
    busy = 3 * job.microbatches * job.stage_ms / 1000
    measured = {
        (name, chunks): float((Path(job.folder) / f"{name} {chunks}").read_text()) for name, chunks in SCHEDULES
    }
    base = measured["1f1b", 1]
    link = f", {job.link_ms:g} ms a message" if job.link_ms else ""
    overlap = "overlapped" if job.overlap else "not overlapped"
    print(f"{job.ranks} ranks, {job.microbatches} microbatches, {job.stage_ms:g} ms a pass{link}, messages {overlap}")
    print("| schedule | simulated bubble | measured bubble | step | against 1F1B, simulated | measured |")
    print("|---|--:|--:|--:|--:|--:|")
    for name, chunks in SCHEDULES:
        settings = PipelineSettings(name, job.ranks, chunks, None, job.overlap)
        bubble = simulated_bubble(job, settings)
        theory = simulated_bubble(job, PipelineSettings("1f1b", job.ranks, 1, None, job.overlap))
        seconds = measured[name, chunks]
        label = f"{name}, {chunks} chunks" if chunks > 1 and name == "interleaved" else name
        print(
            f"| {label} | {100 * bubble:.1f} % | {100 * (seconds / busy - 1):.1f} % | {1000 * seconds:.0f} ms "
            f"| {(1 + theory) / (1 + bubble):.3f} | {base / seconds:.3f} |"
        )
        ratios[label] = seconds / busy / (1 + bubble)
    return ratios


def simulated_bubble(job: Job, settings: PipelineSettings) -> float:
    """The simulated bubble, with messages that are always overlapped; times are in forward passes of a chunk."""
    transfer = job.link_ms / (job.stage_ms / settings.num_chunks)
    return simulate(settings.schedule(job.microbatches), Durations(transfer=transfer)).bubble


if __name__ == "__main__":
    main()
