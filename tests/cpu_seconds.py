"""CPU seconds of tests by folder, ranks and commands included, and whether folders keep to their shares.

Unlike times on the clock they hardly depend on what else the machine does. Starting and collecting is not in them.
"""

from __future__ import annotations

import os
import resource
from collections import Counter, defaultdict
from collections.abc import Generator
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path

import pytest

from tests import budget

_BEGAN = pytest.StashKey[float]()
_NAME = "cpu seconds"


def spent() -> float:
    """CPU seconds of this process, of those that it waited for, and of the server that ranks are forked from, with all
    ranks.
    """
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    server = getattr(forkserver, "_forkserver")._forkserver_pid  # noqa: B009
    ticks = sum(_ticks(each) for each in (server, *_children(server))) if server else 0
    return sum(each.ru_utime + each.ru_stime for each in usages) + ticks / os.sysconf("SC_CLK_TCK")


def _children(process: int) -> list[str]:
    with suppress(OSError):  # there is no /proc outside Linux
        return Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return []


def _ticks(process: int | str) -> int:
    """Clock ticks of a process and of those that it waited for; none of one that has just ended."""
    with suppress(OSError):
        return sum(map(int, Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return 0


def pytest_addoption(parser: pytest.Parser) -> None:
    """The table of a run that is not the default tier."""
    about = "print the CPU seconds of each folder, as a run of the whole default tier does"
    parser.getgroup("tiers").addoption("--cpu-seconds", action="store_true", help=about)


def pytest_configure(config: pytest.Config) -> None:
    """Add up in the process that reports."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Account(config))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin counting."""
    item.stash[_BEGAN] = spent()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """Hand the seconds to the process that reports."""
    yield
    item.user_properties.append((_NAME, spent() - item.stash[_BEGAN]))


class Account:
    """Seconds and tests of each folder; a run of the whole default tier keeps them, and fails over its budget."""

    def __init__(self, config: pytest.Config) -> None:
        option = config.option
        self.is_default_tier = (
            config.args_source is pytest.Config.ArgsSource.TESTPATHS
            and option.all is None
            and not (option.keyword or option.markexpr or option.collectonly or option.lf or option.maxfail)
        )
        self.is_shown = self.is_default_tier or option.cpu_seconds
        self.seconds, self.tests = defaultdict[str, float](float), Counter[str]()
        self.over = list[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a test."""
        for name, value in report.user_properties if report.when == "teardown" else ():
            if name == _NAME:
                self.seconds[budget.folder_of(report.nodeid)] += float(str(value))
                self.tests[budget.folder_of(report.nodeid)] += 1

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Keep what was measured; fail when a folder takes more than its share."""
        if self.is_default_tier and session.exitstatus == pytest.ExitCode.OK:
            assert session.config.cache is not None
            session.config.cache.set(budget.LAST, dict(self.seconds))
            self.over = budget.over(self.seconds, budget.minutes(budget.DOCUMENT.read_text(encoding="utf-8")))
            session.exitstatus = pytest.ExitCode.TESTS_FAILED if self.over else pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Folders with their seconds, the most expensive first."""
        if self.is_shown:
            terminalreporter.section(f"{sum(self.seconds.values()):.0f} CPU seconds")
            for folder, value in sorted(self.seconds.items(), key=lambda each: -each[1]):
                terminalreporter.write_line(f"{value:8.1f}  {self.tests[folder]:5} tests  {folder}")
        for sentence in self.over:
            terminalreporter.write_line(f"FAILED: {sentence}", red=True)
