"""Orders in which ranks run their microbatches: complete, free of deadlocks, with the bubbles that theory promises."""

from __future__ import annotations

from collections import Counter

import pytest

from megatron.config.parallel import PipelineScheduleName
from megatron.core.pipeline_parallel.actions import Action, PipelineSchedule, Placement
from megatron.core.pipeline_parallel.schedules import (
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
)
from megatron.core.pipeline_parallel.settings import PipelineSettings
from megatron.core.pipeline_parallel.simulate import DeadlockError, Durations, simulate
from megatron.core.pipeline_parallel.zero_bubble import zb_h1, zb_v
from tests.harness.sentences import check_sentence

PLAIN = ("gpipe", "1f1b", "zb-h1", "zb-v")
RANKS, MICROBATCHES, CHUNKS = range(1, 9), range(1, 33), range(1, 5)


def text(actions: object) -> str:
    """Actions as ``F0 B0 …``."""
    return " ".join(str(action)[1:] for action in actions)  # type: ignore[attr-defined]


def check_complete(schedule: PipelineSchedule, num_microbatches: int) -> None:
    """Each microbatch goes through each chunk once each way, a split backward pass with both halves."""
    chunks = range(schedule.placement.num_chunks)
    for order in schedule.orders:
        assert set(Counter(order).values()) == {1}
        kinds = {action.kind for action in order}
        assert kinds in ({"F"}, {"F", "B"}, {"F", "I", "W"})
        expected = {Action(kind, chunk, each) for kind in kinds for chunk in chunks for each in range(num_microbatches)}
        assert set(order) == expected


def test_one_stage_is_gradient_accumulation() -> None:
    """Each microbatch's activations are gone before the next one's arrive."""
    assert text(one_f_one_b(1, 3).orders[0]) == "F0 B0 F1 B1 F2 B2"


def test_one_f_one_b() -> None:
    """Two forward passes fill the pipeline from the first of three stages."""
    first, second, last = one_f_one_b(3, 4).orders
    assert text(first) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert text(second) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert text(last) == "F0 B0 F1 B1 F2 B2 F3 B3"


def test_interleaving_takes_turns_between_chunks() -> None:
    """As many microbatches as ranks through a chunk, then the next chunk."""
    assert str(" ".join(map(str, interleaved(2, 4, 2).orders[1]))) == (
        "0F0 0F1 1F0 1B0 1F1 1B1 0F2 0B0 0F3 0B1 1F2 1B2 1F3 1B3 0B2 0B3"
    )


def test_zb_h1_lets_later_ranks_be_late() -> None:
    """Weight-backward passes fill the end, where ranks would wait."""
    assert text(zb_h1(2, 3).orders[0]) == "F0 F1 I0 W0 F2 I1 W1 I2 W2"
    assert text(zb_h1(2, 3).orders[1]) == "F0 I0 F1 I1 W0 F2 I2 W1 W2"


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("ranks", RANKS)
def test_every_size_runs(name: PipelineScheduleName, ranks: int) -> None:
    """A schedule that hangs at some size costs somebody a night on a cluster."""
    for microbatches in MICROBATCHES:
        settings = PipelineSettings(name, ranks)
        schedule = settings.schedule(microbatches)
        check_complete(schedule, microbatches)
        assert schedule.placement == settings.placement
        simulate(schedule)
        simulate(schedule, Durations(forward=1, input_backward=1.3, weight_backward=0.6, transfer=0.4))
        simulate(forward_only(schedule.placement, microbatches))


@pytest.mark.parametrize("group_size", [None, 1, 3, 5, 16])
@pytest.mark.parametrize(
    "ranks", [1, 2, 3, 4, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (5, 6, 7, 8))]
)
def test_interleaving_runs_with_any_numbers(ranks: int, group_size: int | None) -> None:
    """Megatron-LM refuses microbatches that don't divide by ranks, and smaller groups; these must not hang instead."""
    for microbatches in MICROBATCHES:
        for chunks in CHUNKS:
            schedule = interleaved(ranks, microbatches, chunks, group_size=group_size)
            if microbatches % 7 == 1:
                check_complete(schedule, microbatches)
            simulated = simulate(schedule)
            if group_size is None and microbatches % ranks == 0:
                assert simulated.bubble == pytest.approx((ranks - 1) / (microbatches * chunks))
            if group_size is None:
                simulate(forward_only(schedule.placement, microbatches))


@pytest.mark.parametrize("ranks", RANKS)
def test_bubbles_are_those_of_theory(ranks: int) -> None:
    """(pp-1)/m for GPipe and 1F1B; the zero-bubble paper's bounds, in units of a forward pass, for its schedules."""
    for microbatches in MICROBATCHES:
        assert simulate(gpipe(ranks, microbatches)).bubble == pytest.approx((ranks - 1) / microbatches)
        assert simulate(one_f_one_b(ranks, microbatches)).bubble == pytest.approx((ranks - 1) / microbatches)
        if microbatches >= ranks:
            assert simulate(zb_h1(ranks, microbatches)).makespan == 3 * microbatches + ranks - 1
            assert simulate(zb_v(ranks, microbatches)).makespan == 6 * microbatches + ranks - 1


@pytest.mark.parametrize("ranks", RANKS)
def test_what_is_kept_is_bounded(ranks: int) -> None:
    """Memory is what these schedules are chosen by."""
    for microbatches in MICROBATCHES:
        assert simulate(gpipe(ranks, microbatches)).peak_live() == (microbatches,) * ranks
        kept = tuple(min(ranks - rank, microbatches) for rank in range(ranks))
        assert simulate(one_f_one_b(ranks, microbatches)).peak_live() == kept
        assert max(simulate(zb_h1(ranks, microbatches)).peak_live()) <= min(ranks, microbatches)
        assert max(simulate(zb_v(ranks, microbatches)).peak_live()) <= 2 * min(ranks, microbatches)


@pytest.mark.parametrize("ranks", range(2, 9))
def test_interleaving_starts_early_enough_to_hide_messages(ranks: int) -> None:
    """Fewer forward passes ahead have the same bubble on paper, and wait for every message in practice."""
    schedule = interleaved(ranks, 2 * ranks, 2)
    ahead = tuple(2 * (ranks - rank - 1) + ranks + 1 for rank in range(ranks))
    assert simulate(schedule).peak_live() == ahead
    slower = simulate(schedule, Durations(transfer=0.5)).makespan - simulate(schedule).makespan
    assert slower <= 0.5 * 4 * ranks, "messages of the first and last passes alone"


def test_stages_are_placed_once() -> None:
    """A stage without a rank would be a lost part of the model."""
    assert [(location.rank, location.chunk) for location in Placement.vee(3).locations] == [
        (0, 0),
        (1, 0),
        (2, 0),
        (2, 1),
        (1, 1),
        (0, 1),
    ]
    for placement in (Placement.looped(3, 2), Placement.vee(3)):
        held = [stage for rank in range(placement.num_ranks) for stage in placement.stages_of(rank)]
        assert sorted(held) == list(range(placement.num_stages)) and placement.num_chunks == 2


def test_activations_are_weighed_by_stage() -> None:
    """Stages of different size keep different amounts."""
    simulated = simulate(one_f_one_b(2, 4))
    assert simulated.peak_live(lambda stage: 10.0 + stage) == (20.0, 11.0)


def test_deadlock_is_drawn() -> None:
    """Whoever writes a schedule sees where it stops."""
    orders = (
        (Action("F", 0, 0), Action("F", 0, 1), Action("B", 0, 0), Action("B", 0, 1)),
        (Action("F", 0, 0), Action("B", 0, 1), Action("F", 0, 1), Action("B", 0, 0)),
    )
    with pytest.raises(DeadlockError) as caught:
        simulate(PipelineSchedule("mine", orders, Placement.looped(2)))
    check_sentence(str(caught.value), "0B1", "1", "0", "F0", "F1", "B0", "B1")


def test_transfers_and_durations_count() -> None:
    """Predictions for a real model need its own times."""
    simulated = simulate(one_f_one_b(2, 1), Durations(forward=2, input_backward=3, weight_backward=4, transfer=0.5))
    assert simulated.makespan == 2 + 0.5 + 2 + 7 + 0.5 + 7
    assert simulated.idle_within == (10.0, 0.0)
