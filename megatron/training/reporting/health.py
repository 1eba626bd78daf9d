"""The health file of a node: what its first rank is doing, for a supervisor that restarts what no longer moves."""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megatron.core.files.durable import write_errors
from megatron.core.parallel.environment import launch_environment

if TYPE_CHECKING:
    from megatron.training.reporting.metrics import StepRecord
    from megatron.training.run.run import Run

logger = logging.getLogger(__name__)

SECONDS = 10.0
"""Between two writes of the file."""
State = Literal["running", "finished", "failed"]


class HealthFile:
    """Writes ``path`` at once, every ``seconds`` by a thread of its own, and at the end; a reader finds it whole.

    ``look``: what the file says beside time, state and process; ``place`` in it: ``since`` tells how long it is the
    same. A disk that fails later costs a warning, not the run.
    """

    def __init__(self, path: Path, look: Callable[[], Mapping[str, object]], *, seconds: float = SECONDS) -> None:
        self._path, self._look, self._seconds = path, look, seconds
        self._done, self._warned = threading.Event(), False
        self._place: object = None
        self._since = 0.0
        self._thread = threading.Thread(target=self._watch, name="health", daemon=True)

    def start(self) -> None:
        """Write the file and begin to keep it fresh. Raises DataError where it can't be written."""
        with write_errors(self._path, remedy="name another file with --health-file"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self.write("running")
        self._thread.start()

    def stop(self, state: State) -> None:
        """Write how the run has ended; nothing keeps the file fresh from then on."""
        self._done.set()
        self._thread.join()
        self._try_to_write(state)

    def write(self, state: State) -> None:
        """Write the file now. Raises OSError."""
        now, found = time.time(), self._look()
        if found.get("place") != self._place:
            self._place, self._since = found.get("place"), now
        told = {"time": now, "state": state, "since": self._since, "host": socket.gethostname(), "pid": os.getpid()}
        aside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        aside.write_text(json.dumps({**told, **found}) + "\n", encoding="utf-8")
        aside.replace(self._path)  # not synchronized with the disk: a node that lost power is restarted anyway

    def _try_to_write(self, state: State) -> None:
        try:
            self.write(state)
        except OSError as error:
            if not self._warned:
                logger.warning("--health-file %s can't be written (%s): training continues", self._path, error.strerror)
            self._warned = True

    def _watch(self) -> None:
        while not self._done.wait(self._seconds):
            self._try_to_write("running")


@contextmanager
def health_file(run: Run, *, seconds: float = SECONDS) -> Iterator[None]:
    """Keep ``--health-file`` fresh during the block, on the first rank of each node."""
    path, launch = run.config.reporting.health_file, launch_environment()
    if path is None or launch.local_rank:
        yield
        return
    newest: list[StepRecord] = []

    def note(record: StepRecord) -> None:
        newest[:] = [record]

    def look() -> dict[str, object]:
        activity, progress = run.context.mesh.activity, run.progress
        losses = newest[0].losses if newest else {}
        return {
            "rank": run.context.mesh.world_rank,
            "place": activity.place,
            "waits_in": activity.collective,
            "iteration": progress.iteration,
            "train_iters": run.config.train_iters,
            "consumed_samples": progress.consumed_samples,
            "losses": {name: loss if math.isfinite(loss) else str(loss) for name, loss in losses.items()},
        }

    health = HealthFile(Path(path), look, seconds=seconds)
    run.after_step.append(note)
    health.start()
    try:
        yield
    except BaseException:
        health.stop("failed")
        raise
    health.stop("finished")
