"""torchrun's launcher and its ranks, forked from a process that has loaded torch: a start takes a second, not ten."""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.harness.ranks import fork_server

_SET_DEATH_SIGNAL = 1


class ForkedLauncher:
    """A launcher of ``ranks`` ranks that run ``script`` with ``words``, as far as drills use ``subprocess.Popen``.

    Both streams of all go to ``log``; each rank leaves the number of its process beside it.
    """

    def __init__(
        self, script: str, words: Sequence[str], *, ranks: int, log: Path, variables: Mapping[str, str]
    ) -> None:
        given = (script, list(words), ranks, str(log), dict(variables))
        self._process, self._log = fork_server().Process(target=_launch, args=given, daemon=False), log
        log.touch()
        self._process.start()

    @property
    def pid(self) -> int:
        """The launcher's process."""
        assert self._process.pid is not None
        return self._process.pid

    def pid_of(self, rank: int) -> int:
        """The process of a rank that has started."""
        return int(_pid_file(self._log, rank).read_text())

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has ended. Raises TimeoutError after ``timeout`` seconds."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(f"the launcher {self.pid} has not ended in {timeout} s")
        return self._process.exitcode

    def terminate(self) -> None:
        """Send SIGTERM."""
        os.kill(self.pid, signal.SIGTERM)


def _pid_file(log: Path, rank: int) -> Path:
    return log.with_suffix(f".rank{rank}")


def _launch(script: str, words: list[str], ranks: int, log: str, variables: dict[str, str]) -> None:
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(variables)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="fork",
        logs_specs=DefaultLogsSpecs(),
    )
    elastic_launch(config, _run)(script, words, log, os.getpid())


def _run(script: str, words: list[str], log: str, launcher: int) -> int:
    """A rank: the script, as Python would start it."""
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, 0)  # torchrun's own ranks get no signal when it dies
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher's handlers came with the fork
    signal.signal(signal.SIGINT, signal.default_int_handler)
    pid_file = _pid_file(Path(log), int(os.environ["RANK"]))
    pid_file.write_text(str(os.getpid()))
    seen, noted = os.pipe()
    os.set_blocking(noted, False)
    signal.set_wakeup_fd(noted)
    os.write(noted, b"\0")
    sys.argv = [script, *words]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    if os.getppid() != launcher or signal.SIGTERM in os.read(seen, 100):
        os._exit(0)  # torch's own end of a function waits for a launcher that takes its result
    return 0
