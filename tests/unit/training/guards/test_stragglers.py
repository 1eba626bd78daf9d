"""Slow ranks are named, and not those that wait for them."""

from __future__ import annotations

import re
import time
import urllib.request

import pytest

from megatron.config.guards import GuardsConfig
from megatron.core.parallel.activity import Activity
from megatron.core.parallel.collectives import barrier
from megatron.core.parallel.context import ParallelContext
from megatron.errors import ConfigError
from megatron.training.guards.stragglers import WINDOWS, RankSpeed, SlowRanks, Stragglers, speeds, straggler_port
from tests.harness import run_ranks
from tests.harness.ports import free_ports
from tests.harness.sentences import expect_error


def test_time_in_collectives_is_no_work() -> None:
    """A collective within another one counts once."""
    activity = Activity()
    with activity.waiting("all-reduce", (0, 1)):
        time.sleep(0.01)
        with activity.waiting("broadcast", (0, 1)):
            time.sleep(0.01)
    assert 0.02 <= activity.waited < 10
    assert activity.collective == ""


def test_ranks_are_compared_within_their_stage_for_several_windows() -> None:
    """The last stage computes the loss and is slower by design; one slow window is another program's fault."""
    ranks = [RankSpeed(seconds, stage, "n") for seconds, stage in ((1.0, 0), (1.0, 0), (2.0, 0), (3.0, 1), (3.0, 1))]
    found = speeds(ranks)
    assert found == [1.0, 1.0, 0.5, 1.0, 1.0]
    slow = SlowRanks(threshold=0.85)
    assert [slow.add(found) for _ in range(WINDOWS)] == [[]] * (WINDOWS - 1) + [[2]]
    assert slow.add([1.0] * 5) == []
    assert slow.add(found) == []  # it begins anew


def iterations(context: ParallelContext) -> list[str]:
    """The log of a run whose rank 1 takes longer; all wait for it in each iteration."""
    said: list[str] = []
    settings = GuardsConfig(log_straggler=True, straggler_threshold=0.5)
    watch = Stragglers(context, settings, interval=2, say=said.append)
    for number in range(1, 2 * WINDOWS + 1):
        with watch():
            time.sleep(0.05 if context.mesh.world_rank == 1 else 0.005)
            barrier(context.mesh)
        watch.report(number)
    return said


@pytest.mark.slow(reason="it sleeps; the default tier proves how times are compared")
def test_slow_rank_is_named() -> None:
    """All ranks take as long for an iteration, since they wait for each other."""
    said = run_ranks(iterations, dp=3)[0]
    named = [line for line in said if line.startswith("stragglers: rank")]
    assert named
    assert all(line.startswith("stragglers: rank 1 on ") for line in named)
    assert re.search(r"fastest rank [02] .* slowest rank 1 ", said[0])


def test_a_request_is_seen_once_and_a_taken_port_is_refused() -> None:
    """The port must not answer other machines."""
    (port,) = free_ports(1)
    with straggler_port(port) as is_asked:
        assert is_asked is not None
        assert not is_asked()
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60).read()
        assert is_asked()
        assert not is_asked()
        with expect_error(ConfigError, "--straggler-ctrlr-port", hide=[r"\d{5}"]), straggler_port(port):
            pass
