"""CPU seconds of tests by folder, ranks and commands included: ``bash tests/run.sh -p tests.cpu_seconds``.

Unlike times on the clock they hardly depend on what else the machine does. Starting and collecting is not in them.
"""

from __future__ import annotations

import os
import resource
from collections import Counter
from collections.abc import Generator
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path

import pytest

_BEGAN = pytest.StashKey[float]()
_NAME = "cpu seconds"


def spent() -> float:
    """Of this process, of those that it waited for, and of the server that ranks are forked from, with all ranks."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    server = getattr(forkserver, "_forkserver")._forkserver_pid  # noqa: B009
    ranks = Path(f"/proc/{server}/task/{server}/children").read_text().split() if server else []
    ticks = sum(_ticks(each) for each in (server, *ranks) if each)
    return sum(each.ru_utime + each.ru_stime for each in usages) + ticks / os.sysconf("SC_CLK_TCK")


def _ticks(process: int | str) -> int:
    """Of a process and of those that it waited for; none of one that has just ended."""
    with suppress(OSError):
        return sum(map(int, Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return 0


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin counting."""
    item.stash[_BEGAN] = spent()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """Hand the seconds to the process that reports."""
    yield
    item.user_properties.append((_NAME, spent() - item.stash[_BEGAN]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Folders with their seconds, the most expensive first."""
    seconds, tests = Counter[str](), Counter[str]()
    for report in terminalreporter.stats.get("", []):
        for name, value in report.user_properties if report.when == "teardown" else ():
            folder = "/".join(report.nodeid.split("/")[: 3 if "/unit/" in report.nodeid else 2])
            seconds[folder] += value * (name == _NAME)
            tests[folder] += name == _NAME
    terminalreporter.section(f"{seconds.total():.0f} CPU seconds")
    for folder, value in seconds.most_common():
        terminalreporter.write_line(f"{value:8.1f}  {tests[folder]:5} tests  {folder}")
