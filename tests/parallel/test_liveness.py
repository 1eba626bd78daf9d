"""Failures and stalls of a rank end all of them, and are told once. Threads stand for ranks, a dict for the store."""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from typing_extensions import override

from megatron.core.parallel import activity, liveness
from megatron.core.parallel.liveness import Liveness, Patience, watched
from megatron.core.parallel.mesh import Mesh
from tests.harness.sentences import check_line

QUICK = Patience(stall=0.3, poll=0.02, leave=0.1, answer=0.5)


@dataclass
class Left:
    """With what codes ranks have ended their process, and when."""

    codes: dict[int, int] = field(default_factory=dict)

    def expect(self, count: int, *, seconds: float = 60.0) -> None:
        """Wait until ``count`` ranks have left."""
        deadline = time.monotonic() + seconds
        while len(self.codes) < count and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(self.codes) == count


@contextmanager
def ranks(count: int, *, patience: Patience = QUICK) -> Iterator[tuple[list[Liveness], list[Mesh], Left]]:
    """So many watched ranks."""
    store: Any = HashStore()
    left = Left()
    meshes = [Mesh.of(dp=count, rank=rank) for rank in range(count)]

    def leaver(rank: int) -> Any:
        return lambda code: left.codes.update({rank: code})

    watchers = [Liveness(store, mesh, patience, leave=leaver(mesh.world_rank)) for mesh in meshes]
    for watcher in watchers:
        watcher.start()
    yield watchers, meshes, left
    for watcher in watchers:
        watcher.stop()


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time by which a rank's stay in a collective is measured."""
    now = [1000.0]
    monkeypatch.setattr(activity, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_rank_that_is_cut_off_ends(capsys: pytest.CaptureFixture[str]) -> None:
    """The kernel waits a quarter of an hour for a network that is cut, and no thread can ask the store meanwhile."""
    answered, left = threading.Event(), Left()
    store: Any = SimpleNamespace(check=lambda keys: answered.wait(60) and False)
    mesh, patience = Mesh.of(dp=2, rank=1), replace(QUICK, answer=0.05)
    watcher = Liveness(store, mesh, patience, leave=lambda code: left.codes.update({1: code}))
    watcher.start()
    left.expect(1)
    answered.set()
    watcher.stop()
    assert left.codes == {1: 1}
    check_line(capsys.readouterr().err, "error: rank 1", "store", hide=[r"for \d+ s"])


def test_ranks_that_work_are_left_alone(now: list[float]) -> None:
    """A watch that ends healthy runs is worse than none: waiting shortly, again and again, is no stall."""
    with ranks(2) as (_, meshes, left):
        for _ in range(4):
            for mesh in meshes:
                with mesh.activity.waiting("all-reduce over dp", (0, 1)):
                    now[0] += 0.9 * QUICK.stall
                    time.sleep(3 * QUICK.poll)
        assert not left.codes


def test_failure_ends_all_ranks_and_only_the_first_is_told() -> None:
    """Eight ranks would print eight tracebacks, seven of them about the death of the first."""
    with ranks(3) as (watchers, _, left):
        assert watchers[1].call_off("ValueError: boom", exit_code=7)
        assert not watchers[0].call_off("RuntimeError: connection closed", exit_code=1)
        assert watchers[2].called_off_elsewhere(within=60.0)
        left.expect(3)
        assert set(left.codes.values()) == {7}


def test_stall_is_told_once_with_the_missing_rank(capfd: pytest.CaptureFixture[str], now: list[float]) -> None:
    """A hung job tells nobody which of its ranks hangs, and where."""
    with ranks(3, patience=replace(QUICK, answer=60.0)) as (_, meshes, left):
        meshes[1].activity.progress = "iteration 12, batch-generator"
        for rank in (0, 2):
            meshes[rank].activity.progress = "iteration 12, forward-backward"
            meshes[rank].activity.waiting("all-reduce over dp, cp", (0, 1, 2)).__enter__()
        now[0] += 2 * QUICK.stall
        left.expect(3)
        assert set(left.codes.values()) == {1}
    told = capfd.readouterr().err
    assert told.count("missing: rank 1") == 1
    check_line(told, "all-reduce", "dp, cp", "0-2", "12", hide=[r"(?<=rank )\d \(.*?\)"])  # whoever is first
    check_line(told, "rank 1: iteration 12", "batch-generator")
    # Threads of one process, whose main thread is the same: stacks of one moment are shown once, others each.
    heads = re.findall(r"stack of ranks? (\d)(?:-(\d))?(?:, (\d))?", told)
    shown = {rank for first, last, other in heads for rank in range(int(first), int(last or first) + 1)}
    shown |= {int(other) for *_, other in heads if other}
    assert shown == {0, 1, 2}


def test_rank_that_can_not_answer_does_not_hold_up_the_report(capfd: pytest.CaptureFixture[str]) -> None:
    """A rank whose machine is gone never answers."""
    store: Any = HashStore()
    left: dict[int, int] = {}

    mesh = Mesh.of(dp=2, rank=0)
    watcher = Liveness(store, mesh, QUICK, leave=lambda code: left.update({0: code}))
    watcher.start()
    mesh.activity.waiting("all-reduce over dp", (0, 1)).__enter__()
    deadline = time.monotonic() + 60
    while not left and time.monotonic() < deadline:
        time.sleep(0.01)
    watcher.stop()
    assert left == {0: 1}
    check_line(capfd.readouterr().err, "rank 1", "answer")


class StoreOfARank:
    """A store that is gone once the rank that keeps it has left."""

    def __init__(self) -> None:
        self._kept, self.is_gone = HashStore(), False

    def __getattr__(self, name: str) -> Any:
        if self.is_gone:
            raise dist.DistNetworkError("connection reset by peer")
        return getattr(self._kept, name)


def test_error_after_the_keeper_of_the_store_has_left_is_not_shown_again() -> None:
    """Two ranks said that a third was killed: the second one's error came when the first had already left."""
    store: Any = StoreOfARank()
    left: list[int] = []
    patience = Patience(stall=600.0, poll=0.02, leave=60.0, answer=0.5)
    first, late = (
        Liveness(store, Mesh.of(dp=2, rank=rank), patience, leave=lambda _: left.append(1)) for rank in range(2)
    )
    first.start()
    late.start()
    assert first.call_off("RuntimeError: connection closed", exit_code=1)
    started = time.monotonic()
    first.linger()
    assert time.monotonic() - started < patience.leave, "it waited for a rank that had looked"
    store.is_gone = True
    assert late.called_off_elsewhere(within=60.0)
    assert not late.call_off("RuntimeError: connection reset by peer", exit_code=1)
    first.stop()
    late.stop()


class LongWaits(threading.Event):
    """An event that notes waits of more than a poll, which end when it is set, and not with their time."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: queue.Queue[float] = queue.Queue()

    @override
    def wait(self, timeout: float | None = None) -> bool:
        """Wait, without an end of one's own if for longer than a poll."""
        if timeout == QUICK.poll:
            return super().wait(timeout)
        self.seconds.put(timeout or 0.0)
        return super().wait()


def test_the_first_rank_to_fail_has_time_to_show_its_error(now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waited for a killed one as long as its main thread may take, and was ended before it said a word."""

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(liveness, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    store: Any = HashStore()
    patience, before = replace(QUICK, stall=600.0, leave=1.5), now[0]
    first = Liveness(store, Mesh.of(dp=2, rank=0), patience, leave=lambda code: None)
    first._done = waits = LongWaits()
    first.start()
    assert first.call_off("RuntimeError: connection closed", exit_code=1)
    first.linger()
    lingered = now[0] - before
    assert lingered == pytest.approx(patience.leave, abs=0.2)
    assert waits.seconds.get(timeout=60) >= lingered + 0.8 * patience.leave, "it has no time left to show its error"
    first.stop()


def test_an_interrupted_rank_reports_it_unless_another_has() -> None:
    """Ctrl-C on a rank other than 0 ended the run without a word about what is kept."""
    store: Any = HashStore()
    said = []
    for rank in (1, 0):
        mesh = Mesh.of(dp=2, rank=rank)
        with pytest.raises(KeyboardInterrupt) as caught, watched(store, mesh, QUICK):
            raise KeyboardInterrupt("iteration 50 is kept")
        said.append(str(caught.value))
    assert said == ["iteration 50 is kept", ""]
