"""What pytest does in a copy with a fault: put tests in order, and note what begins and what fails, in a file.

The file of ``FAULT_NOTES`` gets a line of JSON an event. ``FAULT_FIRST``: ids of tests to begin with, or parts of ids;
``FAULT_ONLY=1`` leaves out all others. Tests of the slow tier are left out in any case.
"""

from __future__ import annotations

import json
import os

import pytest

FIRST, ONLY, NOTES = "FAULT_FIRST", "FAULT_ONLY", "FAULT_NOTES"


def note(event: str, test: str) -> None:
    """Add an event to the file of notes."""
    with open(os.environ[NOTES], "a", encoding="utf-8") as file:
        file.write(json.dumps([event, test]) + "\n")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the tests that are known to tell."""
    first = json.loads(os.environ.get(FIRST, "[]"))
    items.sort(key=lambda item: not any(each in item.nodeid for each in first))
    if os.environ.get(ONLY):
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in first])
        items[:] = [item for item in items if item.nodeid in first]


def pytest_runtest_logstart(nodeid: str) -> None:
    """Note a test that begins."""
    note("begins", nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note a test that failed or passed."""
    if report.failed:
        note("failed", report.nodeid)
    elif report.passed and report.when == "call":
        note("passed", report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Note a module that can't be imported."""
    if report.failed:
        note("failed", report.nodeid)
