"""What ranks send in a step is what the textbook says, to the byte; see benchmarks/communication.py."""

from __future__ import annotations

import pytest

from benchmarks.communication import measured, textbook, worlds

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
