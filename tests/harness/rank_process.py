"""What one rank of a multi-rank test does: join the group, call the function with its context, report, wait."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.rng import RngStreams, seed_global_generators
from tests.harness.poisoned import poisoned


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every rank of one ``run_ranks`` call is told; ``call`` is the pickled ``(function, arguments)``."""

    call: bytes
    axes: dict[str, Any]
    dtype: torch.dtype
    sequence_parallel: bool
    seed: int
    timeout: float
    folder: Path

    def mesh(self, rank: int) -> Mesh:
        """The mesh as ``rank`` sees it."""
        return Mesh.of(**self.axes, rank=rank)

    def stack_file(self, rank: int) -> Path:
        """Where ``rank`` writes its stack when asked to, or when it crashes."""
        return self.folder / f"rank{rank}.stack"


@dataclass(frozen=True)
class Report:
    """How a rank ended: the pickled result, or the traceback of what it raised."""

    result: bytes | None = None
    traceback: str | None = None


def rank_main(job: Job, rank: int, connection: Connection) -> None:
    """Run one rank; it stays alive after reporting, so that its exit can't look like a failure to the others.

    Each further job that it is sent has process groups of its own.
    """
    with suppress(EOFError):  # the test process is gone
        while True:
            with job.stack_file(rank).open("w") as stack_file:
                faulthandler.enable(stack_file)
                faulthandler.register(signal.SIGUSR1, stack_file, all_threads=True)
                mesh = job.mesh(rank)
                connection.send(_report(job, mesh))
                sys.stdout.flush()
                sys.stderr.flush()
                job = connection.recv()
                faulthandler.disable()
            mesh.forget_groups()  # an optimizer that is never freed would keep their threads and sockets
            dist.destroy_process_group()
    os._exit(0)  # destroying the process groups would take longer than the test


def _report(job: Job, mesh: Mesh) -> Report:
    try:
        warnings.simplefilter("error")
        seed_global_generators(job.seed)
        context = _join(job, mesh)
        function, arguments = _load_call(job.call)
        with poisoned() if os.environ.get("POISON_COLLECTIVES") else nullcontext():
            return Report(result=pickle.dumps(function(context, *arguments)))
    except BaseException:
        return Report(traceback=traceback.format_exc())


def _join(job: Job, mesh: Mesh) -> ModelContext:
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # no host name look-up, no network needed
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job.folder}/store",
        rank=mesh.world_rank,
        world_size=mesh.world_size,
        timeout=timedelta(seconds=2 * job.timeout),  # the harness's own timeout comes first: it shows the stacks
    )
    cpu = torch.device("cpu")
    rng = RngStreams(job.seed, mesh, cpu)
    return ModelContext(mesh=mesh, rng=rng, device=cpu, dtype=job.dtype, sequence_parallel=job.sequence_parallel)


def _load_call(call: bytes) -> tuple[Callable[..., object], tuple[object, ...]]:
    function, arguments = pickle.loads(call)
    return function, arguments
