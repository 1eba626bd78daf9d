"""The report of a stall names the ranks that others wait for."""

from __future__ import annotations

import pytest

from megatron.core.parallel.stall import RankReport, describe_stall, missing_ranks, ranges
from tests.harness.sentences import check_sentence


def report(
    rank: int, collective: str = "", group: tuple[int, ...] = (), *, progress: str = "iteration 3"
) -> RankReport:
    """What ``rank`` answers."""
    return RankReport(
        coordinates=f"dp={rank}",
        place=progress,
        collective=collective,
        group=group,
        seconds_waited=61.0 if collective else 0.0,
        stack=f"  in the code of rank {rank}",
    )


ALL = (0, 1, 2, 3)


def test_rank_in_no_collective_is_the_missing_one() -> None:
    """The ranks that wait would be named, not the one whose data loader hangs."""
    reports = {rank: report(rank, "all-reduce over dp", ALL) for rank in (0, 1, 3)} | {2: report(2, progress="loading")}
    text = describe_stall(0, reports, world_size=4)
    check_sentence(
        text, "61 s", "missing: rank 2", "ranks 0-1, 3: iteration 3", "rank 2 (dp=2):\n  in the code of rank 2"
    )


def test_rank_without_an_answer_is_the_missing_one() -> None:
    """A rank whose machine is gone can't say so; the stacks of the others still tell what they were doing."""
    reports = {rank: report(rank, "all-reduce over dp", ALL) for rank in (0, 1)}
    text = describe_stall(1, reports, world_size=4)
    check_sentence(text, "missing: ranks 2-3")
    assert "stack of rank 2" not in text
    assert "stack of rank 0" in text


def test_ranks_that_wait_elsewhere_are_missing() -> None:
    """Different code on two ranks: all wait for ever, and each would call itself innocent."""
    reports = {0: report(0, "all-reduce over tp", (0, 1)), 1: report(1, "all-gather over tp", (0, 1))}
    assert missing_ranks(0, reports, world_size=2) == [1]
    assert missing_ranks(1, reports, world_size=2) == [0]


def test_waiting_in_a_ring_shows_every_place() -> None:
    """No rank is at fault alone: pairs wait for each other crosswise."""
    same = "receive over pp"
    reports = {0: report(0, same, (0, 1)), 1: report(1, same, (0, 1), progress="iteration 4")}
    text = describe_stall(0, reports, world_size=2)
    check_sentence(text, "stack of rank 0", "stack of rank 1")


@pytest.mark.parametrize(
    ("ranks", "text"), [([], ""), ([3], "3"), ([0, 1, 2], "0-2"), ([5, 0, 1, 7, 6, 9], "0-1, 5-7, 9")]
)
def test_ranges(ranks: list[int], text: str) -> None:
    """A thousand ranks would fill the screen."""
    assert ranges(ranks) == text
