"""What a rank says it is doing."""

from __future__ import annotations

import pytest

from megatron.core.parallel.activity import Activity


def test_waiting_inside_waiting_goes_back_to_the_outer_one() -> None:
    """A GPU's wait for the loss would be forgotten after the collective in it is queued."""
    activity = Activity()
    with activity.waiting("the device's work", (0, 1, 2)):
        with activity.waiting("all-reduce over dp", (0, 1)):
            assert (activity.collective, activity.group) == ("all-reduce over dp", (0, 1))
        assert (activity.collective, activity.group) == ("the device's work", (0, 1, 2))
        assert activity.seconds_waited >= 0.0
    assert activity.collective == "" and activity.seconds_waited == 0.0


def test_place_of_a_failure_stays_on_record() -> None:
    """The report of an error would say where the rank is after it."""
    activity = Activity(progress="iteration 3")

    def fail() -> None:
        with activity.during("forward-backward"), activity.waiting("all-reduce over tp", (0, 1)):
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        fail()
    assert activity.place == "iteration 3, forward-backward"
    assert activity.collective == "all-reduce over tp"


def test_parts_nest() -> None:
    """Saving inside evaluation would leave the part empty for the rest of it."""
    activity = Activity()
    with activity.during("evaluate-time"):
        with activity.during("save-checkpoint"):
            assert activity.part == "save-checkpoint"
        assert activity.part == "evaluate-time"
    assert activity.part == ""
