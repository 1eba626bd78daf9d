"""Reports of failed and stalled ranks, which the ranks exchange through the store of their process group.

A thread on each rank checks every second whether the run has been called off. The first rank that raises calls it off,
and only its error is shown. A rank that has waited too long in a collective calls it off, too; then every rank stores
its place and stack, of which that rank makes one report. All ranks end within seconds, whatever the launcher does.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist

from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.stall import RankReport, describe_stall
from megatron.errors import INTERRUPTED, MegatronError, ParallelError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_FIRST, _CALLED_OFF, _REPORTED = "liveness/first", "liveness/called off", "liveness/reported"
_FINISHED = "liveness/finished with the store"
_STORE_ERRORS = (RuntimeError, dist.DistError)


@dataclasses.dataclass(frozen=True)
class Patience:
    """Time limits in seconds. ``stall``: in one collective before the run is called off. ``poll``: between checks.
    ``leave``: that a main thread has to end unaided. ``answer``: that other ranks have to store their reports.
    ``lingers``: whether rank 0 waits up to ``leave`` for ranks that may still read the store, which it serves.
    """

    stall: float
    poll: float = 1.0
    leave: float = 5.0
    answer: float = 10.0
    lingers: bool = True


class Liveness:
    """Watches this rank's main thread and the other ranks. ``store``: a connection that only this object uses."""

    def __init__(self, store: Store, mesh: Mesh, patience: Patience, *, leave: Callable[[int], Any] = os._exit) -> None:
        self._store, self._mesh, self._patience, self._leave_process = store, mesh, patience, leave
        self._main_thread = threading.main_thread().ident
        self._done, self._order_seen = threading.Event(), threading.Event()
        self._request = 0  # number of the request to the store that is not answered yet; 0: none
        self._thread = threading.Thread(target=self._watch, name="liveness", daemon=True)
        self._limit = threading.Thread(target=self._watch_store, name="liveness limit", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()
        self._limit.start()

    def stop(self) -> None:
        """Stop watching: the run has ended without an error."""
        self._done.set()
        self._thread.join()

    def call_off(self, reason: str, *, exit_code: int) -> bool:
        """Make every rank end. Returns whether this rank is the first to do so, whose reason is shown."""
        try:
            if self._store.add(_FIRST, 1) > 1:
                return False
            order = {"rank": self._mesh.world_rank, "reason": reason, "exit_code": exit_code}
            self._store.set(_CALLED_OFF, json.dumps(order))
        except _STORE_ERRORS:  # rank 0, which serves the store, has ended: unreported, unless after an order
            return not self._order_seen.is_set()
        return True

    def interrupt(self) -> bool:
        """Make every rank leave, as Ctrl-C ended this one; whether this rank is the first, which reports it."""
        is_first = self.call_off("interrupted", exit_code=INTERRUPTED)
        self._done.set()
        self._thread.join(self._patience.poll + 1)
        if not self._order_seen.is_set():  # else the watching thread has counted this rank
            with suppress(*_STORE_ERRORS):
                self._store.add(_FINISHED, 1)
        return is_first

    def linger(self) -> None:
        """Stay on rank 0, which may serve the store, until the others no longer need it, or seem to be gone."""
        everyone = self._mesh.world_size
        if self._mesh.world_rank == 0 and self._patience.lingers:
            with suppress(*_STORE_ERRORS):
                self._until(lambda: self._store.add(_FINISHED, 0) >= everyone, seconds=self._patience.leave)

    def follow(self, *, exit_code: int) -> NoReturn:
        """End because another rank has called the run off; after the watching thread, which may report a stall."""
        self._thread.join(3 * self._patience.answer)
        sys.exit(exit_code)

    def called_off_elsewhere(self, *, within: float) -> bool:
        """Whether another rank has called the run off, or does so within ``within`` seconds."""
        deadline = time.monotonic() + within
        while time.monotonic() < deadline:
            try:
                if self._order_seen.is_set() or self._store.check([_FIRST]):
                    return True
            except _STORE_ERRORS:
                return self._order_seen.is_set()
            time.sleep(0.1)
        return False

    def _watch(self) -> None:
        patience = self._patience
        for number in itertools.count(1):
            self._request = 0
            if self._done.wait(patience.poll):
                return
            self._request = number
            try:
                if self._store.check([_CALLED_OFF]):
                    self._order_seen.set()
                    self._obey(json.loads(self._store.get(_CALLED_OFF)))
                    return
                if self._mesh.activity.seconds_waited > patience.stall:
                    self.call_off("stall", exit_code=ParallelError.exit_code)
            except _STORE_ERRORS:
                if not self._done.wait(patience.leave):
                    _report_line("error: rank 0, which serves the store of all ranks, is gone")
                    self._leave(exit_code=1)
                return

    def _watch_store(self) -> None:
        """End this rank when the store doesn't answer: the network is cut, and the kernel gives up after many minutes
        alone. Time in which this process was stopped doesn't count.
        """
        last, waited, patience = 0, 0.0, self._patience
        limit = patience.stall + 4 * patience.answer  # more than a report takes
        while not self._done.wait(patience.poll):
            request = self._request
            waited, last = (waited + patience.poll if request and request == last else 0.0), request
            if waited > limit:
                _report_line(
                    f"error: rank {self._mesh.world_rank} ({self._mesh.describe()}) has had no answer from the store "
                    f"of all ranks for {waited:.0f} s ({self._mesh.activity.place}): the network between the nodes is "
                    "cut, or the node of rank 0 stands still"
                )
                self._leave(exit_code=1)
                return

    def _obey(self, order: dict[str, Any]) -> None:
        """The run is called off: end, after a stall with a report of this rank."""
        if order["reason"] != "stall":
            self._store.add(_FINISHED, 1)
            lingers = self._patience.leave if order["rank"] == self._mesh.world_rank else 0.0  # then it shows the error
            if not self._done.wait(lingers + self._patience.leave):
                self._leave(exit_code=order["exit_code"])
            return
        me, activity = self._mesh.world_rank, self._mesh.activity
        frame = sys._current_frames().get(self._main_thread or 0)
        report = RankReport(
            coordinates=self._mesh.describe(),
            place=activity.place,
            collective=activity.collective,
            group=activity.group,
            seconds_waited=activity.seconds_waited,
            stack="".join(traceback.format_stack(frame)) if frame is not None else "",
        )
        self._store.set(f"liveness/report {me}", json.dumps(dataclasses.asdict(report)))
        if order["rank"] == me:
            _report_line(f"error: {describe_stall(me, self._collect(), world_size=self._mesh.world_size)}")
            self._store.set(_REPORTED, "1")
        else:
            self._until(lambda: self._store.check([_REPORTED]), seconds=2 * self._patience.answer)
        self._store.add(_FINISHED, 1)
        self.linger()
        self._leave(exit_code=order["exit_code"])

    def _collect(self) -> dict[int, RankReport]:
        keys = {rank: f"liveness/report {rank}" for rank in range(self._mesh.world_size)}
        self._until(lambda: self._store.check(list(keys.values())), seconds=self._patience.answer)
        found = {rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}
        return {rank: RankReport(**{**answer, "group": tuple(answer["group"])}) for rank, answer in found.items()}

    def _until(self, condition: Callable[[], bool], *, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.1)

    def _leave(self, *, exit_code: int) -> None:
        """End the process from this thread: the main thread may be stuck where no exception reaches it."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._leave_process(exit_code)


def _report_line(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


@contextmanager
def watched(store: Store, mesh: Mesh, patience: Patience) -> Iterator[None]:
    """Watch the ranks in a ``with`` block. The first error or Ctrl-C on any rank propagates, with its place in the run;
    errors of other ranks that follow from it end their processes silently.
    """
    liveness = Liveness(store, mesh, patience)
    liveness.start()
    try:
        yield
    except Exception as error:
        place = ", ".join(filter(None, (mesh.activity.place, mesh.activity.collective)))
        is_user_error = isinstance(error, MegatronError)
        exit_code = error.exit_code if isinstance(error, MegatronError) else 1
        # An error in a collective usually means that another rank has died; wait for that rank's report first.
        in_collective = bool(mesh.activity.collective) and not is_user_error
        if in_collective and liveness.called_off_elsewhere(within=patience.leave / 2):
            liveness.follow(exit_code=exit_code)
        if not liveness.call_off(f"{type(error).__name__}: {error}", exit_code=exit_code):
            liveness.follow(exit_code=exit_code)
        liveness.linger()
        if in_collective:
            raise ParallelError(
                f"rank {mesh.world_rank} ({mesh.describe()}) lost another rank in {place}: a process ended without "
                f"an error message (killed, or out of memory?); see the launcher's log and the kernel's ({error})"
            ) from error
        if not is_user_error:
            _report_line(f"rank {mesh.world_rank} ({mesh.describe()}) failed in {place}:")
        raise
    except KeyboardInterrupt:
        if not liveness.interrupt():
            raise KeyboardInterrupt("") from None
        liveness.linger()
        raise
    liveness.stop()
