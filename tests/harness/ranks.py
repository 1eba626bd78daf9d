"""``run_ranks``: call a function on every rank of a small world, on CPU, from a test.

Ranks are forked from a server that has already imported torch, meet over gloo through a file (no ports), and run one
thread each. A rank that raises is reported as its own traceback; a world that hangs, as the stack of every rank.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, TypeVar

import torch

from megatron.core.models.registry import FAMILIES
from tests.harness.rank_process import Job, Report, rank_main

Result = TypeVar("Result")

DEFAULT_TIMEOUT = 120.0
GRACE_AFTER_FAILURE = 0.3  # seconds in which other ranks' own failures are still collected
PRELOADED = [
    "pytest",
    "torch.distributed.checkpoint",
    "torch._dynamo",
    "tests.mock_data",
    "tests.harness.rank_process",
    "megatron.training.loop",
    "megatron.training.pretrain",
    "megatron.training.evaluation.parity",
    *(f"megatron.core.models.{family}.train_spec" for family in FAMILIES),
    "tasks.main",
    "tests.equivalence.families",
    "tests.harness.evaluation",
    "tests.harness.frozen",
]
"""What ranks need not import again: most of a second each. Edits of the library count from the next test run on."""


@dataclass(frozen=True)
class RankFailure:
    """One rank that raised, or died; ``message`` is its traceback, or how it died."""

    rank: int
    coordinates: str
    message: str


class RanksError(AssertionError):
    """One or more ranks of a multi-rank test failed; the message holds the first one's traceback."""

    def __init__(self, failures: list[RankFailure]) -> None:
        self.failures = failures
        first, *others = failures
        lines = [f"rank {first.rank} ({first.coordinates}) failed:", first.message.rstrip()]
        for failure in others:
            lines.append(
                f"rank {failure.rank} ({failure.coordinates}) failed too: {failure.message.rstrip().splitlines()[-1]}"
            )
        super().__init__("\n".join(lines))


class RanksTimeoutError(AssertionError):
    """A world that did not end in time; the message holds every rank's stack."""


def run_ranks(
    function: Callable[..., Result],
    *arguments: object,
    tp: int = 1,
    cp: int = 1,
    dp: int = 1,
    pp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    dc: int = 1,
    copies: int = 1,
    pp_before_dp: bool = True,
    dtype: torch.dtype = torch.float32,
    sequence_parallel: bool = False,
    seed: int = 1234,
    timeout: float = DEFAULT_TIMEOUT,
    reuse: bool = True,
    pool: str = "",
) -> list[Result]:
    """Results of ``function(context, *arguments)`` on each of the dc·tp·cp·dp·pp ranks, in rank order.

    ``function`` lives at the top level of a test module, since ranks import it by name; arguments and results travel
    pickled. Each rank gets a ``ParallelContext`` of the given ``dtype`` and a process group that is already there.
    Warnings are errors in ranks too. Environment variables set by the test don't reach the ranks: pass arguments.
    ``reuse``: in the processes of earlier such calls, and for later ones. Groups and random numbers are new; whatever
    else a function leaves behind is still there, and one that leaves a limit, a handler or a setting of torch's runs in
    processes of its own. Forking and first uses of torch cost half of a short function's time.
    ``pool``: calls with different names share no processes.

    Raises RanksError when a rank fails, RanksTimeoutError after ``timeout`` seconds.
    """
    axes: dict[str, Any] = {"tp": tp, "cp": cp, "dp": dp, "pp": pp, "ep": ep, "etp": etp, "dc": dc, "copies": copies}
    axes["pp_before_dp"] = pp_before_dp
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        job = Job(
            call=_pickle_call(function, arguments),
            axes=axes,
            dtype=dtype,
            sequence_parallel=sequence_parallel,
            seed=seed,
            timeout=timeout,
            folder=Path(folder),
        )
        world = (_IDLE.pop(pool, None) if reuse else None) or _World()
        try:
            world.begin(job)
            world.collect(time.monotonic() + timeout)
        except BaseException:
            world.end()
            raise
        if reuse:
            _IDLE[pool] = world
        else:
            world.end()
        return [pickle.loads(world.results[rank]) for rank in range(world.size)]


def _pickle_call(function: Callable[..., object], arguments: tuple[object, ...]) -> bytes:
    try:
        return pickle.dumps((function, arguments))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(f"ranks import {function} by name and get its arguments pickled: {error}") from error


def fork_server() -> ForkServerContext:
    """Where processes are forked from that have torch loaded."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by the server once, when its first rank is asked for
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


@dataclass
class _World:
    """The rank processes of one call, or of several in turn, and what they have reported so far.

    A call on fewer ranks than there are processes leaves the others alone.
    """

    job: Job = field(init=False)
    processes: list[ForkServerProcess] = field(default_factory=list)
    connections: list[Connection] = field(default_factory=list)
    results: dict[int, bytes] = field(default_factory=dict)
    failures: list[RankFailure] = field(default_factory=list)

    @property
    def size(self) -> int:
        return self.job.mesh(0).world_size

    def begin(self, job: Job) -> None:
        """Have every rank run ``job``; a rank is started by the first job that has it."""
        self.job = job
        self.results.clear()
        for connection in self.connections[: self.size]:
            connection.send(job)
        context = fork_server()
        for rank in range(len(self.processes), self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=rank_main, args=(job, rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)

    def end(self) -> None:
        """No rank is left after it."""
        for process in self.processes:
            process.kill()
        for process, connection in zip(self.processes, self.connections):
            process.join()
            connection.close()

    def collect(self, deadline: float) -> None:
        """Gather every rank's report; stop soon after the first failure, since its peers may now wait for ever."""
        while waiting := self._silent_ranks():
            ready = wait([self.connections[rank] for rank in waiting], max(0.0, deadline - time.monotonic()))
            if not ready and not self.failures:
                raise RanksTimeoutError(self._describe_hang(waiting))
            if not ready:
                break
            for rank in waiting:
                if self.connections[rank] in ready:
                    self._receive(rank)
            if self.failures:
                deadline = min(deadline, time.monotonic() + GRACE_AFTER_FAILURE)
        if self.failures:
            raise RanksError(self.failures)

    def _silent_ranks(self) -> list[int]:
        failed = {failure.rank for failure in self.failures}
        return [rank for rank in range(self.size) if rank not in self.results and rank not in failed]

    def _receive(self, rank: int) -> None:
        try:
            report: Report = self.connections[rank].recv()
        except (EOFError, ConnectionResetError):
            self._fail(rank, self._describe_death(rank))
            return
        if report.result is not None:
            self.results[rank] = report.result
        else:
            assert report.traceback is not None, "a report holds a result or a traceback"
            self._fail(rank, report.traceback)

    def _fail(self, rank: int, message: str) -> None:
        self.failures.append(RankFailure(rank, self.job.mesh(rank).describe(), message))

    def _describe_death(self, rank: int) -> str:
        process = self.processes[rank]
        process.join()
        code = process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
        return f"{self.job.stack_file(rank).read_text()}the process {how} without a report"

    def _describe_hang(self, waiting: list[int]) -> str:
        stacks = self._stacks(waiting)
        lines = [f"{len(waiting)} of {self.size} ranks did not return within {self.job.timeout:g} s"]
        for rank in range(self.size):
            lines.append(f"rank {rank} ({self.job.mesh(rank).describe()}):")
            lines.append(stacks[rank].rstrip() if rank in stacks else "  returned")
        return "\n".join(lines)

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        """Ask ``ranks`` for their stacks; the signal is answered even inside a blocking collective."""
        for rank in ranks:
            if self.processes[rank].is_alive():
                os.kill(self.processes[rank].pid or 0, signal.SIGUSR1)
        deadline = time.monotonic() + 60.0
        while time.monotonic() < deadline:
            stacks = {
                rank: self.job.stack_file(rank).read_text() for rank in ranks if self.job.stack_file(rank).exists()
            }
            if all(_MAIN_THREAD.search(stacks.get(rank, "")) for rank in ranks):
                break
            time.sleep(0.02)
        return {rank: self.job.stack_file(rank).read_text() for rank in ranks if self.job.stack_file(rank).exists()}


_MAIN_THREAD = re.compile(rf" in {rank_main.__name__}\n|^  \.\.\.\n", re.MULTILINE)
"""Where the stack of a rank's main thread ends, below everything that it does, or is cut since it is deep."""

_IDLE: dict[str, _World] = {}
"""Worlds that wait for another call, by the name of their pool. Their processes end with this one."""
