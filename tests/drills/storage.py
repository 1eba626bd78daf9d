"""Storage that is away for two minutes: a service that refuses connections, a file system that is gone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from unittest import mock

from tests.drills.drills import Reference, Say, compare, ended, undisturbed
from tests.drills.job import Job, paced_script
from tests.harness.s3 import credentials, s3_server

_ITERATIONS = 600
_FLAGS = ("--train-iters", str(_ITERATIONS), "--save-interval", "20", "--keep-last-checkpoints", "3")
_TRIED = r"warning: (iteration \d+ could not be saved.*attempt \d+ follows in \d+ s)"


def service_away(folder: Path, say: Say, *, seconds: float = 120.0) -> None:
    """Object storage refuses connections for two minutes: training goes on, and the save is made when it is back."""
    whole = undisturbed(folder, *_FLAGS, iterations=_ITERATIONS)
    with s3_server() as server, mock.patch.dict(os.environ, credentials(server)):
        import fsspec

        fsspec.filesystem("s3").mkdir("bucket")

        _go_through(folder, say, whole, server.stopped, seconds=seconds, save="s3://bucket/run", more=("--async-save",))


def disk_away(folder: Path, say: Say, *, seconds: float = 120.0) -> None:
    """The process behind a file system in user space is killed (bindfs): the same, for a disk and saves that wait."""
    whole = undisturbed(folder, *_FLAGS, iterations=_ITERATIONS)
    true, seen = folder / "true", folder / "seen"
    for path in (true, seen):
        path.mkdir()

    def mount() -> subprocess.Popen[bytes]:
        process = subprocess.Popen(["bindfs", "-f", str(true), str(seen)], stderr=subprocess.DEVNULL)
        while not os.path.ismount(seen):
            time.sleep(0.05)
        return process

    served = [mount()]

    @contextmanager
    def away() -> Iterator[None]:
        served[0].kill()
        served[0].wait()
        yield
        subprocess.run(["umount", "-l", str(seen)], check=True)
        served[0] = mount()

    try:
        _go_through(folder, say, whole, away, seconds=seconds, save=str(seen / "run"), more=())
    finally:
        subprocess.run(["umount", "-l", str(seen)], check=False)
        served[0].kill()
        served[0].wait()


def _go_through(
    folder: Path,
    say: Say,
    whole: Reference,
    away: Callable[[], AbstractContextManager[None]],
    *,
    seconds: float,
    save: str,
    more: tuple[str, ...],
) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    job = Job(folder, *_FLAGS, *more, save="away", place=save, command=[*launcher, paced_script(folder, 0.4)])
    job.wait_for("successfully saved checkpoint from iteration +20")
    with away():
        begun, start = max(job.losses), time.monotonic()
        time.sleep(seconds)
        passed = max(job.losses) - begun
        say(f"   away for {time.monotonic() - start:.0f} s, in which {passed} iterations were trained")
    ended(job, say, code=0)
    attempts = re.findall(_TRIED, job.text)
    for line in attempts:
        say(f"   {line[:200]}")
    assert attempts, job.text[-4000:]
    assert passed > 5, passed
    compare(whole, [job], say)
