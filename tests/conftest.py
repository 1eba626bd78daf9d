"""Rules for all tests: one thread a process, no stray environment, GPU tests only where there is a GPU, two tiers."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

import tests.mock_data  # noqa: F401

GPU_TESTS = Path(__file__).parent / "gpu"
LAUNCHERS = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT SLURM_PROCID SLURM_STEP_NUM_TASKS"

os.environ["OMP_NUM_THREADS"] = "1"  # before anyone imports torch: tests share few cores, and results must repeat
for variable in LAUNCHERS.split():  # a suite that runs inside somebody's Slurm job still sees a world of one
    os.environ.pop(variable, None)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job: commands under test would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


STARTED = time.monotonic()
OUT_OF_TIME = "the time that --slow gives is up"


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--slow``: the second tier."""
    parser.addoption(
        "--slow",
        type=float,
        metavar="SECONDS",
        help="run the tests marked slow, and no others, in random order, and begin none after SECONDS",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take the tier that is asked for, unless tests are named."""
    skip_without_gpu(items)
    seconds = config.getoption("--slow")
    if seconds is None and any("::" in word for word in config.args):
        return
    left = [item for item in items if (item.get_closest_marker("slow") is not None) != (seconds is not None)]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in set(left)]
    if seconds is not None:  # all processes must agree on the order
        random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID", STARTED)).shuffle(items)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin no slow test when the time is up."""
    seconds = item.config.getoption("--slow")
    if seconds is not None and time.monotonic() - STARTED > seconds:
        pytest.skip(OUT_OF_TIME)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which slow tests there was no time for."""
    skipped = terminalreporter.stats.get("skipped", [])
    left = Counter(each.nodeid.partition("[")[0] for each in skipped if OUT_OF_TIME in str(each.longrepr))
    if left:
        terminalreporter.section(f"{left.total()} slow tests did not run: {OUT_OF_TIME}")
    for test, count in sorted(left.items()):
        terminalreporter.write_line(f"{count:4} {test}")


def skip_without_gpu(items: list[pytest.Item]) -> None:
    """Skip tests below tests/gpu on a machine without a GPU."""
    on_gpu = [item for item in items if item.path.is_relative_to(GPU_TESTS)]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
