"""Scripts of the repository run to their end, each rank in a process forked from one that has loaded torch.

What runs is the script itself, as ``__main__`` and with a command line; starting Python and importing torch for every
rank would take longer than most scripts do here. Where the launcher matters, tests start a real one.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import MappingProxyType

from tests import mock_data
from tests.harness.data import REPOSITORY
from tests.harness.ports import free_ports
from tests.harness.ranks import fork_server


@dataclass(frozen=True)
class Ended:
    """How a script ended: 0, the exit code of a script on one rank, or 1 for several; what it printed; the exit code of
    each rank.
    """

    code: int
    output: str
    codes: list[int | None]


def start_script(
    script: str,
    words: Sequence[str],
    *,
    log: Path,
    variables: Mapping[str, str] = MappingProxyType({}),
    documents: int = mock_data.FEW,
) -> BaseProcess:
    """Start ``script`` with ``words``; both streams go to ``log``. ``variables``: of its environment, beside ours.
    ``documents``: in mock data.
    """
    given = (script, list(words), dict(variables), str(log), documents)
    process = fork_server().Process(target=_run, args=given, daemon=False)
    process.start()
    return process


def run_script(
    script: str,
    words: Sequence[str],
    *,
    ranks: int,
    log: Path,
    timeout: float = 280.0,
    grace: float = 60.0,
    documents: int = mock_data.FEW,
) -> Ended:
    """Run ``script`` with ``words`` on ``ranks`` ranks, as torchrun does on one node; both streams go to ``log``.

    ``grace``: seconds in which the other ranks end by themselves after one has failed. ``documents``: in mock data.
    """
    port = free_ports(1)[0]
    processes = []
    for rank in range(ranks):
        launcher = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        variables = {name: str(value) for name, value in launcher.items()} if ranks > 1 else {}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} if ranks > 1 else {}
        processes.append(start_script(script, words, log=log, variables=variables, documents=documents))
    try:
        _wait(processes, timeout, grace)
    finally:
        for process in processes:
            process.kill()
            process.join()
    codes = [process.exitcode for process in processes]
    return Ended(codes[0] or 0 if ranks == 1 else int(any(codes)), log.read_text(), codes)


def _wait(processes: Sequence[BaseProcess], timeout: float, grace: float) -> None:
    """Until all have ended, or the time is up; it is up soon when one has failed."""
    deadline, running = time.monotonic() + timeout, list(processes)
    while running and wait([process.sentinel for process in running], max(0.0, deadline - time.monotonic())):
        running = [process for process in running if process.is_alive()]
        if any(process.exitcode for process in processes):
            deadline = min(deadline, time.monotonic() + grace)


def _run(script: str, words: list[str], variables: Mapping[str, str], log: str, documents: int) -> None:
    """In a process of its own: the script, as Python would start it."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(variables)
    mock_data.keep(documents)
    sys.argv = [script, *words]
    sys.path.insert(0, str((REPOSITORY / script).parent))
    runpy.run_path(str(REPOSITORY / script), run_name="__main__")
