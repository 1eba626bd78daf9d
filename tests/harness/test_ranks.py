"""The harness tells the truth: results in order, a failing rank by its own traceback, a hanging world by its stacks."""

from __future__ import annotations

import os
import time
import warnings
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.parallel.context import ParallelContext
from tests.harness import RanksError, ranks, run_ranks
from tests.harness.ranks import RanksTimeoutError


def coordinates(context: ParallelContext, label: str) -> tuple[str, int, int, torch.dtype, bool]:
    mesh = context.mesh
    return (
        f"{label} {mesh.describe()}",
        dist.get_rank(),
        torch.get_num_threads(),
        context.dtype,
        context.sequence_parallel,
    )


def sum_over_tp(context: ParallelContext) -> torch.Tensor:
    value = torch.tensor([float(context.mesh.world_rank)])
    group = context.mesh.group("tp")
    if group is not None:
        dist.all_reduce(value, group=group)
    return value


def raise_on_rank(context: ParallelContext, bad: tuple[int, ...]) -> None:
    if context.mesh.world_rank in bad:
        raise ValueError(f"no luck on rank {context.mesh.world_rank}")
    dist.barrier()


def hang_on_rank(context: ParallelContext, bad: int, reached: Path) -> int:
    if context.mesh.world_rank == bad:
        reached.touch()
        time.sleep(1000)
    return context.mesh.world_rank


def wait_for_a_peer_that_never_comes(context: ParallelContext, reached: Path) -> None:
    if context.mesh.world_rank == 0:
        reached.touch()
        dist.all_reduce(torch.zeros(1))


def die(context: ParallelContext) -> None:
    if context.mesh.world_rank == 1:
        os._exit(7)
    dist.barrier()


def warn(context: ParallelContext) -> None:
    warnings.warn("careful", UserWarning, stacklevel=1)


def leave_one_waiting(context: ParallelContext, reached: Path) -> None:
    if context.mesh.world_rank == 1:
        reached.touch()
        dist.all_reduce(torch.zeros(1))


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file: the time of two ranks is up half a second after one has written it and the other one has reported."""
    reached = tmp_path / "reached"

    def wait_for_both(connections: list[Connection], seconds: float) -> list[Any]:
        while not (ready := wait(connections, 0.5)) and not (reached.exists() and len(connections) == 1):
            pass
        return ready

    monkeypatch.setattr(ranks, "wait", wait_for_both)
    return reached


def test_results_come_in_rank_order_with_the_context_asked_for() -> None:
    """Every test that compares ranks relies on who is where."""
    results = run_ranks(coordinates, "at", tp=2, dp=2, dtype=torch.float64, sequence_parallel=True)
    assert [result[0] for result in results] == [
        "at pp=0 dp=0 cp=0 tp=0",
        "at pp=0 dp=0 cp=0 tp=1",
        "at pp=0 dp=1 cp=0 tp=0",
        "at pp=0 dp=1 cp=0 tp=1",
    ]
    assert [result[1:] for result in results] == [(rank, 1, torch.float64, True) for rank in range(4)]


def test_groups_connect_the_ranks_of_their_axis_only() -> None:
    """A collective on tp must not reach across dp."""
    assert [value.item() for value in run_ranks(sum_over_tp, tp=2, dp=2)] == [1.0, 1.0, 5.0, 5.0]


def test_a_single_rank_needs_no_peers() -> None:
    """A world of one is a world too: tests are parametrized from 1 upwards."""
    assert [value.item() for value in run_ranks(sum_over_tp)] == [0.0]


def test_a_raising_rank_is_reported_by_its_own_traceback() -> None:
    """Not by the timeout of a peer that waited for it."""
    with pytest.raises(RanksError) as caught:
        run_ranks(raise_on_rank, (2,), tp=2, dp=2)
    message = str(caught.value)
    assert message.startswith("rank 2 (pp=0 dp=1 cp=0 tp=0) failed:")
    assert "in raise_on_rank" in message
    assert "ValueError: no luck on rank 2" in message
    assert [failure.rank for failure in caught.value.failures] == [2]


def test_all_raising_ranks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One traceback whole, the others by their last line: the reader sees whether they failed alike."""
    monkeypatch.setattr(ranks, "GRACE_AFTER_FAILURE", 60.0)  # the second one may be slow
    with pytest.raises(RanksError, match=r"failed too: ValueError: no luck on rank"):
        run_ranks(raise_on_rank, (0, 1), tp=2)


def test_a_hanging_rank_is_shown_by_its_stack(reached: Path) -> None:
    """The reader learns which rank hangs, where, and that the others returned."""
    with pytest.raises(RanksTimeoutError) as caught:
        run_ranks(hang_on_rank, 1, reached, tp=2, timeout=1)
    message = str(caught.value)
    assert message.startswith("1 of 2 ranks did not return within 1 s")
    assert "rank 0 (pp=0 dp=0 cp=0 tp=0):\n  returned" in message
    assert "in hang_on_rank" in message


def test_a_rank_stuck_in_a_collective_is_shown_too(reached: Path) -> None:
    """Python signal handlers don't run inside a blocking C++ call; the stack must appear all the same."""
    with pytest.raises(RanksTimeoutError, match="in wait_for_a_peer_that_never_comes"):
        run_ranks(wait_for_a_peer_that_never_comes, reached, tp=2)


def test_a_dying_rank_is_reported_with_its_exit_code() -> None:
    """A crash without a traceback (the kernel's memory killer, a C++ abort) is not a hang."""
    with pytest.raises(RanksError, match="exit code 7 without a report"):
        run_ranks(die, tp=2)


def test_warnings_are_errors_in_ranks() -> None:
    """The same rule as in the test process."""
    with pytest.raises(RanksError, match="UserWarning: careful"):
        run_ranks(warn)


def test_a_finished_rank_keeps_its_sockets_open(reached: Path) -> None:
    """Who waits for a rank that returned hangs visibly, and sees no broken connection in its place."""
    with pytest.raises(RanksTimeoutError, match="in leave_one_waiting"):
        run_ranks(leave_one_waiting, reached, tp=2)


def process(context: ParallelContext) -> tuple[int, float]:
    """Its id, and a sum over a group of a part of the ranks."""
    return os.getpid(), sum_over_tp(context).item()


def test_processes_are_reused_unless_a_call_asks_for_its_own() -> None:
    """A call that reads module state would see another test's, and groups of other ranks must not be met again."""
    layouts: list[dict[str, Any]] = [{"tp": 2, "dp": 2}, {"tp": 4}, {"tp": 2}, {"tp": 4}]
    results = [run_ranks(process, **layout) for layout in layouts]
    assert [[total for _, total in each] for each in results] == [[1, 1, 5, 5], [6] * 4, [1, 1], [6] * 4]
    numbers = [[number for number, _ in each] for each in results]
    assert numbers == [numbers[0], numbers[0], numbers[0][:2], numbers[0]]
    alone = run_ranks(process, tp=2, dp=2, reuse=False)
    assert {number for number, _ in alone}.isdisjoint(numbers[0])


def test_processes_are_not_reused_after_a_failure() -> None:
    """A peer of the rank that failed may still wait for it; the next test would hang."""
    before = run_ranks(process, tp=2)
    with pytest.raises(RanksError, match="no luck"):
        run_ranks(raise_on_rank, (0,), tp=2)
    after = run_ranks(process, tp=2)
    assert {number for number, _ in before}.isdisjoint(number for number, _ in after)


def test_a_function_that_ranks_cannot_import_is_refused() -> None:
    """A lambda cannot travel by name; say so instead of failing in the child."""
    with pytest.raises(TypeError, match="by name"):
        run_ranks(lambda context: None)
