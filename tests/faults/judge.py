"""Run the affected parts of the default tier against a fault, and say whether they notice it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tests.faults.affected import affected, likely
from tests.faults.copy_of_checkout import CheckoutCopy, Run
from tests.faults.fault import Fault
from tests.faults.record import UNFINISHED, Verdict

NO_TESTS = 5  # what pytest ends with when nothing was collected
HANG = 150.0  # seconds; tests of the default tier take a few


def judge(copy: CheckoutCopy, fault: Fault, *, told: str, limit: float) -> Verdict:
    """Whether the default tier turns red with ``fault``.

    ``told``: the test that caught it the last time, or "". Files that are likely to catch it run first; then all
    affected parts. ``limit``: seconds for everything, after which the verdict is ``UNFINISHED``.
    """
    began = time.monotonic()
    with copy.edited(fault):
        parts = affected(fault)
        first = _in_order([told, *(each.partition("::")[2] for each in fault.first)])
        soon = _in_order([told.partition("::")[0], *likely(fault)])
        verdict = "survived", ""
        for chosen in (soon, parts):
            if chosen:
                run = copy.pytest(chosen, first=first, hang=HANG, until=began + limit)
                verdict = outcome(run)
            if verdict[0] != "survived":
                break
    how, test = verdict
    return Verdict(fault.digest, how, test, round(time.monotonic() - began, 1))


def outcome(run: Run) -> tuple[str, str]:
    """How a run ended, in a word, and the test that says so."""
    if run.failed:
        return "failed", run.failed[0]
    if run.hung:
        return "hung", run.running
    if run.code is None:
        return UNFINISHED, ""
    if run.code in (0, NO_TESTS):
        return "survived", ""
    return "crashed", run.running or run.output.strip().splitlines()[-1]


def sound(copy: CheckoutCopy, tests: Sequence[str], *, limit: float) -> set[str]:
    """Which of these tests are of the default tier and pass without a fault."""
    files = _in_order([test.partition("::")[0] for test in tests])
    if not files:
        return set()
    return set(copy.pytest(files, first=tests, only=True, hang=HANG, until=time.monotonic() + limit).passed)


def _in_order(names: Sequence[str]) -> list[str]:
    return [name for name in dict.fromkeys(names) if name]
