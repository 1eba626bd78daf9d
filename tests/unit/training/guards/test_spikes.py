"""Spikes of the loss: what is one, and what a run does about it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron.config.guards import GuardsConfig
from megatron.core.parallel.context import ParallelContext
from megatron.training.checkpoints.loading import load
from megatron.training.guards import guard
from megatron.training.guards.spikes import LOSS, GuardState, deviations_above, large_in, spike_in
from megatron.training.loop import train_and_save
from megatron.training.run.run import Run
from megatron.training.step import BatchSums, StepNumbers, read_numbers
from tests.harness.runs import tiny_run
from tests.harness.sentences import expect_error

FLAGS = "--mock-data --lr-decay-style constant --log-interval 1 --spike-window 8 --train-iters 16"


@contextmanager
def spikes(*iterations: int) -> Iterator[None]:
    """Losses of these iterations are 1000 times as large as computed."""

    def read(run: Run, sums: BatchSums) -> StepNumbers:
        numbers = read_numbers(run, sums)
        if run.progress.iteration + 1 not in iterations:
            return numbers
        totals = {name: (1000.0 * total, count) for name, (total, count) in numbers.loss.totals.items()}
        return replace(numbers, loss=replace(numbers.loss, totals=totals))

    with mock.patch.object(guard, "read_numbers", read):
        yield


def trained(flags: str, *, at: Collection[int] = ()) -> Run:
    """A run after its last iteration, or the one at which it exits."""
    run = tiny_run(ParallelContext.single(), f"{FLAGS} {flags}")
    load(run)
    with spikes(*at):
        train_and_save(run)
    return run


def assert_same_weights(one: Run, other: Run) -> None:
    for mine, theirs in zip(one.model_state(), other.model_state(), strict=True):
        assert torch.equal(mine.tensor, theirs.tensor), mine.name


def test_a_spike_is_far_above_the_median() -> None:
    """Neither a value far below, nor one beside few or constant values, may stop a run."""
    window = [2.0, 2.1, 1.9, 2.0, 2.2, 1.8, 2.0, 2.1]
    settings, state = GuardsConfig(spike_action="warn"), GuardState()
    assert deviations_above(5.0, window[:7]) is None
    assert deviations_above(2.0 + 1.4826 * 0.1, window) == pytest.approx(1.0)
    assert deviations_above(2.1, [2.0] * 8) == pytest.approx(5.0)  # a deviation is at least 1 % of the median
    for each in window:
        state.take({LOSS: each}, size=8)
    assert spike_in({LOSS: 3.6}, state, settings)
    assert not spike_in({LOSS: 3.4}, state, settings)
    assert not spike_in({LOSS: 0.1}, state, settings)
    assert not spike_in({LOSS: float("nan")}, state, settings)  # which is no spike: the run stops anyway


def test_large_is_ten_times_the_largest_of_the_first_hundred() -> None:
    """Megatron-LM's two checks, each by its own flag."""
    state = GuardState()
    for number in range(101):
        assert not large_in({LOSS: 100.0}, state, GuardsConfig(check_for_spiky_loss=True)) or number == 100
        state.take({LOSS: 2.0 if number == 50 else 1.0}, size=8)
    assert large_in({LOSS: 20.0}, state, GuardsConfig(check_for_spiky_loss=True))
    assert not large_in({LOSS: 19.9}, state, GuardsConfig(check_for_spiky_loss=True))
    assert not large_in({LOSS: 20.0}, state, GuardsConfig(check_for_large_grads=True))
    assert len(state.windows[LOSS]) == 8


def test_rolled_back_run_is_one_that_never_saw_the_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The spike has spoiled weights before it is seen, so they are those of the last checkpoint again."""
    saving = f"--save-interval 5 --save {tmp_path}"
    rolled = trained(f"{saving}/rolled --load {tmp_path}/rolled --spike-action rollback", at=[13])
    assert "iterations 11 to 13 are passed over" in capsys.readouterr().out
    never = trained("--iterations-to-skip 11-13")
    assert_same_weights(rolled, never)
    assert vars(rolled.progress) == vars(never.progress)


@pytest.mark.slow(reason="nine runs; the default tier proves that a rollback passes over the right data")
@pytest.mark.parametrize("action", ["warn", "skip", "rollback"])
def test_run_that_stops_after_a_spike_goes_on_as_one_that_did_not(action: str, tmp_path: Path) -> None:
    """What is usual, and how many spikes there were, is part of the checkpoint."""
    flags = f"--spike-action {action} --save-interval 5"
    one, other = (f"{flags} --save {tmp_path}/{name} --load {tmp_path}/{name}" for name in ("whole", "parts"))
    whole = trained(one, at=[13])
    trained(f"{other} --exit-interval 14", at=[13])
    resumed = trained(other, at=[13])
    assert_same_weights(whole, resumed)
    assert whole.guards == resumed.guards
    assert vars(whole.progress) == vars(resumed.progress)


def test_skipped_spike_changes_nothing_and_too_many_end_the_run() -> None:
    """A bad batch costs its step; a run that diverges must not skip its way to the end."""
    skipping = trained("--spike-action skip --spike-limit 2", at=[13, 15])
    never = trained("--iterations-to-skip 13 15")
    assert_same_weights(skipping, never)
    with expect_error(guard.ResultError, "--spike-limit 1", "13", "15", exit_code=2):
        trained("--spike-action skip --spike-limit 1", at=[13, 15])
