"""Which tests run, in which order, and until when: the options of the whole tier, and of an order of one's own."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

STARTED = time.monotonic()
OUT_OF_TIME = "the time that --all gives is up"
REVERSED = "reversed"
DEFAULT_TESTS = pytest.StashKey[Counter[str]]()
"""How many tests of the default tier each module has, of those that this run collected as a whole."""
STEPS_OF_THE_TABLE = "TEST_STEPS_OF_THE_TABLE"
"""Environment variable: how many steps rows of tests/equivalence take, in ranks too."""
EVERY_EXAMPLE = "TEST_EVERY_EXAMPLE"
"""Environment variable: that property tests take all of their examples."""
LAYOUT_SEED = "LAYOUT_SEED"
"""Environment variable: a number that decides what is drawn at random; unless given, it is that of the random order."""
TOGETHER = 20
"""Most tests of a module that stay neighbours in a random order: what a module shares is made once for them."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """The whole tier and the order."""
    group = parser.getgroup("tiers")
    group.addoption(
        "--all",
        type=float,
        nargs="?",
        const=float("inf"),
        metavar="SECONDS",
        help="run the tests marked slow, too, in random order, and begin none after SECONDS",
    )
    group.addoption("--without-default", action="store_true", help="with --all: without the tests of the default tier")
    group.addoption(
        "--order", metavar="SEED", help=f"order of the tests: a number that decides a random one, or {REVERSED!r}"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Choose a seed, in the process that starts the others."""
    order = config.option.order = getattr(config, "workerinput", {}).get("order", config.option.order)
    if order is None and config.option.all is not None:
        config.option.order = str(random.SystemRandom().randrange(10_000))
    elif order not in (None, REVERSED) and not order.isdecimal():
        raise pytest.UsageError(f"--order {order}: expected a number or {REVERSED!r}")
    os.environ.setdefault(LAYOUT_SEED, (config.option.order or "0").replace(REVERSED, "0"))
    if config.option.without_default and config.option.all is None:
        raise pytest.UsageError("--without-default leaves no test without --all")
    if config.option.all is not None:
        os.environ |= {STEPS_OF_THE_TABLE: "3", EVERY_EXAMPLE: "1"}


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Hand the seed to a process that runs tests; all of them must agree on the order."""
    node.workerinput["order"] = node.config.option.order


def pytest_sessionstart(session: pytest.Session) -> None:
    """Say how to have this order again."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and session.config.option.order:
        reporter.write_line(f"order of the tests: --order {session.config.option.order}")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take the tier that is asked for, unless tests are named, and put it in order."""
    named = any("::" in word for word in config.args)
    if config.option.all is None and not named:
        _leave(config, items, [item for item in items if is_slow(item)])
    elif config.option.without_default:
        _leave(config, items, [item for item in items if not is_slow(item)])
    if config.option.order == REVERSED:
        items.reverse()
    elif config.option.order:
        items[:] = shuffled(items, int(config.option.order))


def default_tests(config: pytest.Config, items: Iterable[pytest.Item]) -> Counter[str]:
    """Tests of the default tier in each module, none where all are slow; no modules when tests are named."""
    count = Counter[str]()
    if not any("::" in word for word in config.args) and not config.getoption("lf", False):
        for item in items:
            count[item.nodeid.partition("::")[0]] += not is_slow(item)
    return count


def is_slow(item: pytest.Item) -> bool:
    """Whether a test is in the whole tier alone."""
    return item.get_closest_marker("slow") is not None


def _leave(config: pytest.Config, items: list[pytest.Item], left: list[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=left)
    gone = {*left}
    items[:] = [item for item in items if item not in gone]


def shuffled(items: Iterable[pytest.Item], seed: int) -> list[pytest.Item]:
    """Tests in random order, and few enough of a module together that a time limit cuts no module out as a whole."""
    rng, groups = random.Random(seed), list[list[pytest.Item]]()
    for _, tests in itertools.groupby(items, key=lambda item: item.path):
        rng.shuffle(module := list(tests))
        groups += [module[start : start + TOGETHER] for start in range(0, len(module), TOGETHER)]
    rng.shuffle(groups)
    return [item for group in groups for item in group]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin no test when the time is up."""
    seconds = item.config.option.all
    if seconds is not None and time.monotonic() - STARTED > seconds:
        pytest.skip(OUT_OF_TIME)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say for which tests there was no time."""
    skipped = terminalreporter.stats.get("skipped", [])
    left = Counter(each.nodeid.partition("[")[0] for each in skipped if OUT_OF_TIME in str(each.longrepr))
    if left:
        terminalreporter.section(f"{left.total()} tests did not begin: {OUT_OF_TIME}")
    for test, count in sorted(left.items()):
        terminalreporter.write_line(f"{count:4} {test}")
