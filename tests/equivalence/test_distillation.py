"""A teacher, of another depth and width, beside its student at every kind of layout, against one rank."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.training.evaluation.parity import Observed
from tests.equivalence.flags import (
    CP2,
    EP2,
    ETP1,
    EXPERTS,
    FULL,
    FUSED,
    LLAMA,
    LOOPED,
    PP2,
    SELECTIVE,
    SMALL,
    SP,
    TP2,
    TP8,
    VEE,
    ZB_H1,
    ZERO_OVERLAPPED,
)
from tests.equivalence.test_equivalence import check
from tests.equivalence.training import EVERY_ROW, train_alone, train_at
from tests.harness.teachers import write_teacher
from tests.tiers import pairs

EIGHT = f"{SMALL} --num-attention-heads 8"
TEACHERS: dict[str, str] = {
    "deeper": f"{LLAMA} --num-layers 7 --hidden-size 48",
    "experts": f"{LLAMA} --num-layers 3 {EXPERTS} --moe-router-topk 2 --final-logit-softcapping 5",
    "tied": f"{EIGHT} --num-layers 5",
}
VARIANTS: dict[str, tuple[str, str]] = {
    "by a deeper and wider one": (f"{LLAMA} --num-layers 4", "deeper"),
    "at a temperature, with labels": (
        f"{LLAMA} --num-layers 4 --mtp-num-layers 1 --distill-share 0.6 --distill-temperature 2",
        "deeper",
    ),
    "experts by experts": (f"{LLAMA} --num-layers 4 {EXPERTS} --moe-router-topk 2 --distill-share 0.5", "experts"),
    "adapters by a tied one": (
        f"{LLAMA} --num-layers 4 --lora-rank 3 --pretrained-checkpoint unread --z-loss-coeff 0.01 --distill-share 0.5",
        "tied",
    ),
}
LAYOUTS: dict[str, str] = {
    "tp2 sp": f"--world-size 2 {TP2} {SP} {ETP1} {SELECTIVE}",
    "tp2 sp ep2 dp2 zero": f"--world-size 4 {TP2} {SP} {EP2} {ZERO_OVERLAPPED} --ddp-bucket-size 1000 {FULL}",
    "tp2 etp2 cp2": f"--world-size 4 {TP2} {CP2} --expert-tensor-parallel-size 2",
    "tp8": f"--world-size 8 {TP8} {ETP1}",
    "dp2 zero 2": "--world-size 2 --zero-stage 2",
    "tp2 dp2 zero 3": f"--world-size 4 {TP2} {SP} {ETP1} --zero-stage 3 {FULL}",
    "pp2 zb-h1 dp2 zero, accumulation fused": f"--world-size 4 {PP2} {ZB_H1} {ZERO_OVERLAPPED} {FUSED}",
    "pp2 vpp2": f"--world-size 2 {LOOPED} {FULL}",
    "pp2 zb-v dp2 zero 3": f"--world-size 4 {VEE} --zero-stage 3",
}


@functools.cache
def teacher(name: str) -> Path:
    """The checkpoint of a teacher, which goes when the tests end."""
    place = Path(PLACE.name) / name
    return write_teacher(place, f"{EVERY_ROW} {TEACHERS[name]}")


PLACE = tempfile.TemporaryDirectory()


@pytest.fixture(scope="module", autouse=True)
def removed() -> Iterator[None]:
    """Teachers are there while this module runs."""
    yield
    PLACE.cleanup()


def row_of(variant: str) -> str:
    """The student's flags, with the place of its teacher."""
    flags, name = VARIANTS[variant]
    return f"{flags} --teacher-load {teacher(name)}"


@functools.cache
def reference(variant: str) -> Observed:
    """The table's steps on one rank."""
    return train_alone(row_of(variant))


@pytest.mark.parametrize(
    ("variant", "layout"),
    pairs(
        VARIANTS,
        LAYOUTS,
        rich=("tp2 sp ep2 dp2 zero",),
        slow=("tp8", "pp2 zb-v dp2 zero 3", "dp2 zero 2", "tp2 sp", "tp2 etp2 cp2", "tp2 dp2 zero 3"),
    ),
)
def test_layouts_learn_the_same_from_a_teacher(variant: str, layout: str) -> None:
    """A teacher whose softmax was of a part of the vocabulary, whose hidden states came from another microbatch, or
    whose rows were another slice of the sequence, taught each layout something else.
    """
    check(train_at(row_of(variant), LAYOUTS[layout]), [reference(variant)])
