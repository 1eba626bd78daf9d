"""What ranks send in a step is what the textbook says, and a dry run, to the byte; see benchmarks/communication.py."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.communication import LAYOUTS, all_reduced, config_of, measured, textbook, worlds
from megatron.core.models.registry import FAMILIES
from megatron.planning.communication import SentBytes, sent_bytes

FIRST = ("TP 2, PP 2, DP 2, ZeRO 1", "ZeRO 2, PP 2, DP 2, ZB-H1")
"""Ways of dividing work in the default tier."""


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param(layouts, id=layouts[0], marks=[] if layouts[0] in FIRST else pytest.mark.slow)
        for layouts in worlds()
    ],
)
def test_bytes_sent_are_the_textbooks(layouts: list[str]) -> None:
    """An exchange too many shows in no loss and in no test on one machine: it costs a tenth of a large run."""
    for layout, counted in measured(layouts).items():
        assert counted == [textbook(layout, rank) for rank in range(len(counted))], layout


TWO_LEVELS = next(layouts for layouts in worlds() if layouts[0] == "ZeRO 1, DP 4 in 2 copies")


def by_purpose(sent: Counter[str], ranks: int) -> SentBytes:
    """What one of ``ranks`` data-parallel ranks sent, beside the norm of gradients and sums of losses."""
    gradients = sent["all-reduce dp"] - all_reduced(8, ranks) - all_reduced(16, ranks)
    return SentBytes(
        gradients=gradients + sent["reduce-scatter dp"] + sent["reduce-scatter dp, in a copy"],
        weights=sent["all-gather dp"] + sent["all-gather dp, in a copy"],
        gradients_between=sent["all-reduce dp, copies"] + sent["reduce-scatter dp, copies"],
        weights_between=sent["all-gather dp, copies"],
    )


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param(layouts, id=layouts[0], marks=[] if layouts == TWO_LEVELS else pytest.mark.slow)
        for layouts in worlds()
        if set(LAYOUTS[layouts[0]][0]) <= {"dp", "copies"}
    ],
)
def test_a_dry_run_states_what_is_sent(layouts: list[str]) -> None:
    """Who chooses a stage of ZeRO, or a number of copies, by the network had to know the formulas."""
    for layout, counted in measured(layouts).items():
        assert counted == [textbook(layout, rank) for rank in range(len(counted))], layout
        stated = sent_bytes(config_of(layout), FAMILIES["gpt"].train_spec, 0)
        assert {by_purpose(sent, len(counted)) for sent in counted} == {stated}, layout
