"""Ranks that compute slower than others: the time of each rank in its steps, without what it waits for the others."""

from __future__ import annotations

import http.server
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from statistics import median

import torch
from typing_extensions import override

from megatron.config.guards import GuardsConfig
from megatron.core.device import is_gpu
from megatron.core.parallel.collectives import gather_objects
from megatron.core.parallel.context import ParallelContext
from megatron.errors import ConfigError
from megatron.training.guards.results import place_of
from megatron.training.run.run import Run

WINDOWS = 3
"""Intervals of the log in a row in which a rank must be slow before the log names it."""
_PROBE, _PRODUCTS = 4096, 8  # width and number of the products that GPUs are timed by


@dataclass(frozen=True)
class RankSpeed:
    """Seconds of a rank's own work in an iteration, and who its peers are. ``stage``: its pipeline stage."""

    seconds: float
    stage: int
    place: str


def speeds(ranks: Sequence[RankSpeed]) -> list[float]:
    """The speed of each rank beside the median of its stage, whose ranks have equal work; below 1 it is slower."""
    usual = {
        stage: median(each.seconds for each in ranks if each.stage == stage) for stage in {each.stage for each in ranks}
    }
    return [usual[each.stage] / each.seconds if each.seconds > 0 else 1.0 for each in ranks]


class SlowRanks:
    """Which ranks have been slow in each of the last windows."""

    def __init__(self, *, threshold: float) -> None:
        self._threshold, self._windows = threshold, Counter[int]()

    def add(self, found: Sequence[float]) -> list[int]:
        """Take the speeds of a window; the ranks that have been slow in ``WINDOWS`` of them in a row."""
        self._windows = Counter(
            {rank: self._windows[rank] + 1 for rank, speed in enumerate(found) if speed < self._threshold}
        )
        return sorted(rank for rank, windows in self._windows.items() if windows >= WINDOWS)


def straggler_lines(
    ranks: Sequence[RankSpeed], found: Sequence[float], slow: Sequence[int], *, listed: int
) -> list[str]:
    """The log's lines about a window: the ``listed`` fastest and slowest ranks, and those that have long been slow."""
    order = sorted(range(len(ranks)), key=lambda rank: ranks[rank].seconds)

    def words(chosen: Sequence[int]) -> str:
        return ", ".join(f"rank {rank} {1000 * ranks[rank].seconds:.1f} ms" for rank in chosen)

    lines = [f"stragglers: own time per iteration: fastest {words(order[:listed])}; slowest {words(order[-listed:])}"]
    lines += [
        f"stragglers: rank {rank} on {ranks[rank].place} has {100 * found[rank]:.0f} % of the speed of its peers, for "
        f"{WINDOWS} intervals"
        for rank in slow
    ]
    return lines


class Timed:
    """Hooks around and after each iteration; this base class measures nothing."""

    def __call__(self) -> AbstractContextManager[None]:
        """A context for an iteration: its data and its step."""
        return nullcontext()

    def report(self, iteration: int) -> None:
        """Look at the times at the end of ``iteration``. A collective."""


class Stragglers(Timed):
    """Measures this rank's own time in steps, and compares it with that of all ranks at each ``--log-interval``.

    On a CPU a step's time without the collectives in it; on a GPU, where those are in the queue with all else, the time
    of fixed products. ``say``: prints on one rank. ``named``: called on every rank with the places that are slow.
    ``is_asked``: whether rank 0 was asked to turn this on or off.
    """

    def __init__(
        self,
        context: ParallelContext,
        settings: GuardsConfig,
        *,
        interval: int,
        say: Callable[[str], None],
        named: Callable[[Sequence[str], str], None] = lambda places, what: None,
        is_asked: Callable[[], bool] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._context, self._settings, self._interval = context, settings, interval
        self._say, self._named, self._is_asked, self._clock = say, named, is_asked, clock
        self._slow = SlowRanks(threshold=settings.straggler_threshold)
        self._told: set[int] = set()
        self._is_on = not settings.disable_straggler_on_startup
        self._seconds, self._steps = 0.0, 0

    @override
    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Time an iteration."""
        activity = self._context.mesh.activity
        start, waited = self._clock(), activity.waited
        yield
        self._seconds += self._clock() - start - (activity.waited - waited)
        self._steps += 1

    @override
    def report(self, iteration: int) -> None:
        """At the end of an interval, compare the ranks. A collective."""
        if iteration % self._interval or not self._steps:
            return
        seconds, self._seconds, self._steps = self._seconds / self._steps, 0.0, 0
        device, mesh = self._context.device, self._context.mesh
        if is_gpu(device) and self._is_on:
            seconds = product_seconds(device)
        mine = RankSpeed(seconds, mesh.rank("pp"), place_of(self._context))
        everyone = gather_objects((mine, self._is_asked is not None and self._is_asked()), mesh)
        if self._is_on:
            self._compare([each[0] for each in everyone])
        if everyone[0][1]:
            self._is_on = not self._is_on
            self._say(f"stragglers: turned {'on' if self._is_on else 'off'} through --straggler-ctrlr-port")

    def _compare(self, ranks: list[RankSpeed]) -> None:
        found = speeds(ranks)
        slow = self._slow.add(found)
        for line in straggler_lines(ranks, found, slow, listed=self._settings.straggler_minmax_count):
            self._say(line)
        if new := [rank for rank in slow if rank not in self._told]:
            self._told.update(new)
            self._named([ranks[rank].place for rank in new], "slow")


def product_seconds(device: torch.device) -> float:
    """Seconds of fixed products in bf16 on a GPU, the shortest of a few."""
    a = torch.ones(_PROBE, _PROBE, dtype=torch.bfloat16, device=device)
    best = float("inf")
    for _ in range(3):
        torch.accelerator.synchronize()
        start = time.perf_counter()
        for _ in range(_PRODUCTS):
            a @ a
        torch.accelerator.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


@contextmanager
def straggler_port(port: int | None) -> Iterator[Callable[[], bool] | None]:
    """Listen on the loopback interface during the block; yields whether a request has come since the last call.

    Raises ConfigError for a port that is taken.
    """
    if port is None:
        yield None
        return
    asked = threading.Event()

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.set()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"stragglers: turned over at the end of this log interval\n")

        @override
        def log_message(self, format: str, *args: object) -> None:
            """Requests are no lines of the log."""

    try:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Answer)
    except OSError as error:
        raise ConfigError(f"--straggler-ctrlr-port {port}: {error.strerror}; give another port") from None

    def is_asked() -> bool:
        found = asked.is_set()
        asked.clear()
        return found

    thread = threading.Thread(target=server.serve_forever, name="stragglers", daemon=True)
    thread.start()
    try:
        yield is_asked
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def watching_stragglers(run: Run) -> Iterator[Timed]:
    """What times iterations in the block, with ``--log-straggler``, and listens on its port. Raises ConfigError."""
    settings, mesh = run.config.guards, run.context.mesh
    if not settings.log_straggler:
        yield Timed()
        return
    with straggler_port(settings.straggler_ctrlr_port if mesh.world_rank == 0 else None) as is_asked:
        yield Stragglers(
            run.context,
            settings,
            interval=run.config.reporting.log_interval,
            say=run.reporter.say,
            named=run.fault if mesh.world_rank == 0 else lambda places, what: None,
            is_asked=is_asked,
        )
