"""Storage that is away for two minutes (a service that refuses connections, a file system that is gone), and copies."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from unittest import mock

from megatron.config.checkpoint import CheckpointConfig
from tests.drills.drills import Reference, Say, compare, ended, undisturbed
from tests.drills.job import PACE, Job, paced_script
from tests.harness.ports import free_ports
from tests.harness.s3 import credentials, s3_server

_ITERATIONS = 600
_FLAGS = ("--train-iters", str(_ITERATIONS), "--save-interval", "20", "--keep-last-checkpoints", "3")
_LONG_INTERVAL = ("--save-interval", "40")
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
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

    served = subprocess.Popen(["bindfs", "-f", str(true), str(seen)], stderr=subprocess.DEVNULL)
    while not os.path.ismount(seen):
        assert served.poll() is None, "bindfs can't mount here"
        time.sleep(0.05)

    @contextmanager
    def away() -> Iterator[None]:
        served.kill()
        yield
        subprocess.run(["mount", "--bind", str(true), str(seen)], check=True)  # over it: nothing is seen beneath

    try:
        _go_through(folder, say, whole, away, seconds=seconds, save=str(seen / "run"), more=())
    finally:
        served.kill()
        served.wait()
        for _ in range(2):
            subprocess.run(["umount", "-l", str(seen)], check=False, stderr=subprocess.DEVNULL)


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
    launcher = [*_TORCHRUN, "--standalone", "--nproc_per_node=2"]
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


def lost_node(folder: Path, say: Say) -> None:
    """A node is killed and its folder is wiped: a new one gets its part from its partner's copy, bit for bit."""
    whole, (port,) = undisturbed(folder, *_LONG_INTERVAL), free_ports(1)
    copies = ["--non-persistent-save-interval", "2", "--non-persistent-ckpt-type", "local", "--replication"]
    copies += ["--non-persistent-local-ckpt-dir", f"{folder}/node$NODE"]

    def start(node: int) -> Job:
        launcher = [*_TORCHRUN, "--nnodes=2", f"--node-rank={node}", "--nproc_per_node=1"]
        words = [*launcher, "--master-addr=127.0.0.1", f"--master-port={port}", paced_script(folder, PACE)]
        return Job(folder, *_LONG_INTERVAL, *copies, save="run", command=words, variables={"NODE": str(node)})

    jobs = [start(node) for node in (0, 1)]
    jobs[1].wait_for(r"copied iteration +12")
    jobs[1].end()
    shutil.rmtree(folder / "node1")
    jobs[0].wait()
    say("   node 1 is killed and its folder is gone; node 0 has ended")
    again = [start(node) for node in (0, 1)]
    for job in again:
        ended(job, say, code=0)
    said = re.findall(r"recovering from the copy of iteration (\d+), in place of (.*)", again[1].text)
    assert said, again[1].text[:4000]
    assert int(said[0][0]) >= 12, said
    say(f"   recovered from the copy of iteration {said[0][0]}, in place of {said[0][1]}")
    left = [str(path) for path in folder.glob("node*/*")]
    assert not left, left
    compare(whole, [jobs[1], again[1]], say)


def memory_copies(folder: Path, say: Say) -> None:
    """A rank is killed: all are started again from copies in memory, which the end of the run deletes."""
    whole = undisturbed(folder, *_LONG_INTERVAL)
    copies = ["--non-persistent-save-interval", "2", "--non-persistent-ckpt-type", "in_memory", "--async-save"]
    job = Job(folder, *_LONG_INTERVAL, *copies, save="killed", restarts=1)
    job.wait_for(r"copied iteration +12")
    os.kill(job.pid_of(1), signal.SIGKILL)
    ended(job, say, code=0)
    said = re.findall(r"recovering from the copy of iteration (\d+), in place of (.*)", job.text)
    assert said, job.text[-4000:]
    say(f"   recovered from the copy of iteration {said[0][0]}, in place of {said[0][1]}")
    compare(whole, [job], say)
    place = CheckpointConfig(save=str(job.save)).saved_place
    left = [*Path("/dev/shm").glob(f"*{place}*")]
    assert not left, left
