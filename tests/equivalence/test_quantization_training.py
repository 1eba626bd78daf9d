"""The rows of the table with rounded weights: scales of a weight don't depend on which ranks hold it.

A scale of a part of a group would move a weight by a sixteenth of the group's range, which shows in the first digits.
"""

from __future__ import annotations

import pytest

from tests.equivalence.flags import (
    CP2,
    EP2,
    ETP2,
    EXPERTS,
    FULL,
    LLAMA,
    PP2,
    SELECTIVE,
    SP,
    TP2,
    TP4,
    ZB_H1,
    ZERO_2,
    ZERO_3,
    ZERO_OVERLAPPED,
)
from tests.equivalence.test_equivalence import check
from tests.equivalence.training import train_alone, train_at
from tests.tiers import pairs

QAT = "--quantization-aware-training"
WIDE = f"{LLAMA} --ffn-hidden-size 96"
VARIANTS: dict[str, str] = {
    "int4, ranks divide groups": f"{WIDE} {QAT} int4 --qat-group-size 32",
    "w8a8, experts": f"{LLAMA} {EXPERTS} --moe-ffn-hidden-size 32 {QAT} w8a8",
    "int4 with zero points, experts": (
        f"{LLAMA} {EXPERTS} --moe-ffn-hidden-size 32 {QAT} int4-asym --qat-group-size 32"
    ),
    "fp8": f"{WIDE} {QAT} fp8",
    "fp8-tensor, experts": f"{LLAMA} {EXPERTS} --moe-ffn-hidden-size 32 {QAT} fp8-tensor",
}
LAYOUTS: dict[str, str] = {
    "tp2 sp": f"--world-size 2 {TP2} {SP}",
    "tp2 etp2 zero": f"--world-size 4 {TP2} {ETP2} {ZERO_OVERLAPPED}",
    "tp4 sp, recompute": f"--world-size 4 {TP4} {SP} {FULL}",
    "pp2 zb-h1 tp2": f"--world-size 4 {TP2} {PP2} {ZB_H1}",
    "dp2 zero 3, recompute": f"--world-size 2 {ZERO_3} {SELECTIVE} --recompute-modules core_attn mlp",
    "dp2 zero 2": f"--world-size 2 {ZERO_2}",
    "dp2 ep2": f"--world-size 2 {EP2}",
    "cp2": f"--world-size 2 {CP2}",
}


@pytest.mark.parametrize(
    ("variant", "layout"), pairs(VARIANTS, LAYOUTS, rich=("tp2 sp", "tp2 etp2 zero"), slow=("dp2 zero 2", "cp2"))
)
def test_layout_rounds_what_one_rank_rounds(variant: str, layout: str) -> None:
    """A scale of a part of a group instead of all of it would train another model."""
    check(train_at(VARIANTS[variant], LAYOUTS[layout]), [train_alone(VARIANTS[variant])])


def test_products_are_of_rounded_weights() -> None:
    """Else all of the above would hold of a run that ignores the flag."""
    first = "step 1, lm loss"
    rounded, plain = train_alone(VARIANTS["int4, ranks divide groups"]).losses[first], train_alone(WIDE).losses[first]
    assert 1e-5 < abs(rounded - plain) < 0.1
