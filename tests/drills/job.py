"""A real training job whose processes a drill kills, stops and starts again, and what its log says."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from megatron.core.files.remote_path import AnyPath, path_of
from tests.drills.forked import ForkedLauncher
from tests.end_to_end.commands import ROOT, TINY, environment, losses

ITERATIONS = 40
FLAGS = f"{TINY} --global-batch-size 12 --train-iters {ITERATIONS} --save-interval 5 --node-ledger"
PACE = 0.05
PATIENCE = 600.0
"""Seconds after which a drill gives up, on a machine that does much else."""
PACED = """
import sys, time
sys.path.insert(0, {root!r})
import pretrain_gpt
import tests.mock_data
from megatron.training.run.stop import ExitWatch

reason = ExitWatch.reason

def paced(watch, iteration):
    time.sleep({pace})
    return reason(watch, iteration)

ExitWatch.reason = paced
if __name__ == "__main__":
    pretrain_gpt.main(pretrain_gpt.FAMILIES["gpt"])
"""
"""``pretrain_gpt.py`` whose iterations take a while, so that what happens to it happens in the midst of them."""


def paced_script(folder: Path, pace: float) -> str:
    """The path of a script that pretrains, ``pace`` seconds an iteration at least."""
    path = folder / f"paced-{pace}.py"
    path.write_text(PACED.format(root=str(ROOT), pace=pace))
    return str(path)


class Job:
    """A start of ``pretrain_gpt.py`` in ``folder`` under torchrun, or what ``command`` says, with a log of its own.

    ``place``: where it saves, if not in ``folder``.
    ``restarts``: of torchrun. ``variables``: for its environment. ``command``: before the flags. ``forked``: launcher
    and ranks are forked from a process that has loaded torch. ``pace``: seconds that an iteration takes at least.
    """

    started: ClassVar[list[Job]] = []

    def __init__(
        self,
        folder: Path,
        *flags: str,
        save: str,
        place: str | None = None,
        ranks: int = 2,
        restarts: int = 0,
        variables: Mapping[str, str] | None = None,
        command: Sequence[str] | None = None,
        forked: bool = False,
        pace: float = PACE,
    ) -> None:
        self.started.append(self)
        self._orphans = list[int]()
        self.save = folder / save
        self.place: AnyPath = self.save if place is None else path_of(place)
        number = len([*folder.glob(f"{save}-*.log")])
        self.path = folder / f"{save}-{number}.log"
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        words = [sys.executable, *launcher, f"--max-restarts={restarts}", paced_script(folder, pace)]
        given = [*FLAGS.split(), *flags, "--save", str(self.place), "--load", str(self.place)]
        environ = environment() | dict(variables or {})
        self.process: subprocess.Popen[bytes] | ForkedLauncher
        if forked:
            script = paced_script(folder, pace)
            self.process = ForkedLauncher(script, given, ranks=ranks, log=self.path, variables=environ)
            return
        with self.path.open("wb") as log:
            self.process = subprocess.Popen(
                [*(command or words), *given],
                env=environ,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=ROOT,
            )

    @property
    def text(self) -> str:
        """The log so far."""
        return self.path.read_text(encoding="utf-8", errors="replace")

    @property
    def losses(self) -> dict[int, str]:
        """The loss of each iteration, as printed."""
        return losses(self.text)

    def wait_for(self, words: str) -> None:
        """Wait until the log has ``words``, a regular expression."""
        end = time.monotonic() + PATIENCE
        while not re.search(words, self.text):
            assert self.process.poll() is None, f"the job ended before {words!r}:\n{self.text[-4000:]}"
            assert time.monotonic() < end, f"{words!r} did not come:\n{self.text[-4000:]}"
            time.sleep(0.02)

    def wait_for_iteration(self, number: int) -> None:
        """Wait until the log has the line of an iteration."""
        self.wait_for(rf"iteration +{number}/")

    def pid_of(self, rank: int) -> int:
        """The process of a rank."""
        if isinstance(self.process, ForkedLauncher):
            return self.process.pid_of(rank)
        for pid in _descendants(self.process.pid):
            with suppress(OSError):
                if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    return pid
        raise AssertionError(f"there is no process of rank {rank}")

    def kill_launcher(self) -> None:
        """Kill the launcher alone."""
        self._orphans = _descendants(self.process.pid)
        os.kill(self.process.pid, signal.SIGKILL)

    def wait(self) -> int:
        """The exit code, once every process of the job has ended."""
        ranks = [*_descendants(self.process.pid), *self._orphans]
        code = self.process.wait(PATIENCE)
        end = time.monotonic() + 60
        while any(Path(f"/proc/{pid}").exists() and _state(pid) != "Z" for pid in ranks):
            assert time.monotonic() < end, f"processes are left of {ranks}"
            time.sleep(0.05)
        return code

    def end(self) -> None:
        """Kill what is left of the job."""
        for pid in [*_descendants(self.process.pid), *self._orphans, self.process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            found += [int(child), *_descendants(int(child))]
    return found


def _state(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "Z"
