"""Saves that wait in main memory for a storage that is away, and when they are tried again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from megatron.core.checkpointing.save import PendingSave, Snapshot
from megatron.core.checkpointing.sharded_view import Staging
from megatron.core.files.remote_path import AnyPath
from megatron.training.checkpoints.tiers import named_origin

FIRST_PAUSE, LONGEST_PAUSE = 10.0, 300.0
"""Seconds between an attempt that failed and the next one; each pause is twice the one before."""


@dataclass(eq=False)
class Job:
    """A save of the run: what it holds, its attempts so far, and the memory of its copy, if it has been copied.

    ``samples``: what ``progress.txt`` will note when it is durable. ``since``: when the first attempt failed.
    """

    snapshot: Snapshot
    samples: int
    staging: Staging | None = None
    attempts: int = 0
    since: float | None = None

    @property
    def iteration(self) -> int:
        """The iteration that is saved."""
        return self.snapshot.iteration

    @property
    def origin(self) -> str:
        """The name of the checkpoint that it will be, for copies that are made after it."""
        return named_origin(self.snapshot.iteration, self.snapshot.taken_at)

    def start(self, root: AnyPath) -> PendingSave:
        """Begin an attempt; in the background where the tensors have been copied. A collective."""
        pending = PendingSave(root, self.snapshot, attempt=self.attempts, is_tried_again=True)
        if self.staging is not None:
            pending.write_in_background()
        return pending


@dataclass
class WaitingSaves:
    """The failed saves of a run, oldest first, ``most`` at a time. Ranks hold the same ones.

    ``clock``: seconds that only grow. Times are this rank's own; rank 0's decide.
    """

    most: int
    clock: Callable[[], float] = time.monotonic
    jobs: list[Job] = field(default_factory=list)
    _free: list[Staging] = field(default_factory=list)
    _next: float = 0.0

    def copied(self, job: Job) -> Job:
        """The job with a copy of its tensors in memory."""
        if job.staging is None:
            job.staging = self._free.pop() if self._free else Staging()
            job.snapshot.copy_into(job.staging)
        return job

    def make_room(self) -> list[Job]:
        """Drop the oldest until there is room for another; those that were dropped."""
        dropped = list[Job]()
        while len(self.jobs) >= self.most:
            dropped.append(self.jobs[0])
            self.done(self.jobs[0])
        return dropped

    def add(self, job: Job) -> None:
        """Let a job wait, behind older ones; there is room."""
        self.jobs.append(self.copied(job))

    def done(self, job: Job) -> None:
        """Forget a job; its memory serves the next one."""
        if job in self.jobs:
            self.jobs.remove(job)
        if job.staging is not None:
            self._free.append(job.staging)
            job.staging = None

    def failed(self, job: Job) -> float:
        """Count a failed attempt; seconds until the next one."""
        job.attempts += 1
        job.since = self.clock() if job.since is None else job.since
        pause = min(FIRST_PAUSE * 2.0 ** (job.attempts - 1), LONGEST_PAUSE)
        self._next = self.clock() + pause
        return pause

    def answered(self) -> None:
        """The storage has taken a save: the next one needs no pause."""
        self._next = self.clock()

    @property
    def pause(self) -> float:
        """Seconds until the oldest is to be tried again; 0 when it is time."""
        return max(0.0, self._next - self.clock())

    def tried_for(self, job: Job, *, since: float | None = None) -> float:
        """Seconds since the first attempt failed, or ``since`` a time of the clock."""
        begun = job.since if since is None else since
        return 0.0 if begun is None else self.clock() - begun
