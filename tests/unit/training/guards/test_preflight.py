"""The test of every device before training."""

from __future__ import annotations

import time
from unittest import mock

import pytest
import torch

from megatron.core.parallel.context import ParallelContext
from megatron.training.guards import preflight as tested
from megatron.training.guards.preflight import RankHealth, judge, preflight
from tests.harness import run_ranks
from tests.harness.sentences import check_sentence, refusal


def test_wrong_and_slow_ranks_are_told_from_the_others() -> None:
    """By the median of all: one slow rank must not make the others fast ones."""
    ranks = [RankHealth(f"n{rank}", rank != 2, {"products": 10.0 - rank, "link": 4.0}) for rank in range(4)]
    ranks[1] = RankHealth("n1", True, {"products": 9.0, "link": 1.0})
    found = judge(ranks, threshold=0.5)
    assert found.wrong == ["n2"]
    assert found.slow == {"n1": "rank 1: link 25 % of the median"}
    assert found.medians == {"products": 8.5, "link": 4.0}


def test_one_wrong_element_of_a_product_is_seen() -> None:
    """Products of whole numbers are exact in fp32, whatever the order of their sums."""
    a = tested._numbers(64).float()
    assert tested._is_product(a @ a.T, a)
    wrong = a @ a.T
    wrong[3, 5] += 1
    assert not tested._is_product(wrong, a)


def checked(context: ParallelContext, wrong: int) -> tuple[list[str], float]:
    """What a preflight says, and its seconds; the products of rank ``wrong`` are."""
    said: list[str] = []
    start = time.perf_counter()
    product = tested._is_product

    def is_product(result: torch.Tensor, a: torch.Tensor) -> bool:
        return product(result + int(context.mesh.world_rank == wrong), a)

    with mock.patch.object(tested, "_is_product", is_product), mock.patch("socket.gethostname", return_value="n17"):
        preflight(context, threshold=0.001, stops=True, say=said.append, fault=lambda places, what: said.append(what))
    return said, time.perf_counter() - start


@pytest.mark.slow(reason="it measures for seconds; the default tier proves what is made of the measurements")
def test_preflight_of_ranks_takes_seconds_and_a_wrong_one_ends_the_run() -> None:
    """At most 20 s, links included."""
    for said, seconds in run_ranks(checked, -1, dp=3):
        assert seconds < 60
        assert "preflight of 3 ranks" in said[0]
        assert "link" in said[0]
    for sentence in run_ranks(refusal, checked, 1, dp=3):
        check_sentence(sentence, "ParallelError", "n17")
