"""A teacher, of another depth and width, beside its student at every kind of layout, against one rank."""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.core.datasets.teacher_scores import ScoreArrays, read_header
from megatron.core.parallel.context import ParallelContext
from megatron.training.teacher_scoring import score
from tests.equivalence.flags import (
    CP2,
    EXPERTS,
    FULL,
    LLAMA,
    LOOPED,
    PP2,
    SMALL,
    SP,
    TP2,
    VEE,
)
from tests.equivalence.test_equivalence import check
from tests.equivalence.test_lora import LAYOUTS
from tests.equivalence.training import EVERY_ROW, at, run_of, train_alone, train_at
from tests.harness import run_ranks
from tests.harness.runs import context_of
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
    "hidden states of a wider one": (
        f"{LLAMA} --num-layers 4 --distill-share 0.5 --distill-hidden-scale 0.7 "
        "--distill-hidden-states 0:1 2:4:mse final:final",
        "deeper",
    ),
    "experts by experts": (f"{LLAMA} --num-layers 4 {EXPERTS} --moe-router-topk 2 --distill-share 0.5", "experts"),
    "adapters by a tied one": (
        f"{LLAMA} --num-layers 4 --lora-rank 3 --pretrained-checkpoint unread --z-loss-coeff 0.01 --distill-share 0.5",
        "tied",
    ),
}


@functools.cache
def teacher(name: str) -> Path:
    """The checkpoint of a teacher, which goes when the tests end."""
    place = Path(PLACE.name) / name
    return write_teacher(place, f"{EVERY_ROW} {TEACHERS[name]}")


PLACE = tempfile.TemporaryDirectory()


@pytest.fixture(scope="module", autouse=True)
def removed() -> Iterator[None]:
    """Teachers are there while tests of this module run, which a random order does in several parts."""
    yield
    teacher.cache_clear()
    scores.cache_clear()
    for folder in Path(PLACE.name).iterdir():
        shutil.rmtree(folder)


def row_of(variant: str) -> str:
    """The student's flags, with the place of its teacher."""
    flags, name = VARIANTS[variant]
    return f"{flags} --teacher-load {teacher(name)}"


@pytest.mark.parametrize(
    ("variant", "layout"),
    pairs(
        VARIANTS,
        LAYOUTS,
        rich=("tp2 sp ep2 dp2 zero",),
        slow=(
            "by a deeper and wider one",  # the next two learn more from it
            "tp8",
            "pp2 zb-v dp2 zero 3",
            "dp2 zero 2",
            "tp2 sp",
            "tp2 etp2 cp2",
            "tp2 dp2 zero 3",
        ),
    ),
)
def test_layouts_learn_the_same_from_a_teacher(variant: str, layout: str) -> None:
    """A teacher whose softmax was of a part of the vocabulary, whose hidden states came from another microbatch, or
    whose rows were another slice of the sequence, taught each layout something else.
    """
    check(train_at(row_of(variant), LAYOUTS[layout]), [train_alone(row_of(variant))])


TOP, STORED = 9, "at a temperature, with labels"


def score_on_rank(context: ParallelContext, row: str, layout: str, place: Path) -> None:
    """This rank's part of the work."""
    family, config = run_of(row, layout)
    on, quiet = context_of(config, context), lambda line: None
    score(config, family.train_spec, on, place, top_k=TOP, log_probs="float64", say=quiet)


@functools.cache
def scores(layout: str = "") -> Path:
    """What the teacher says of the table's samples, stored in fp64 at a layout."""
    place, row = Path(PLACE.name) / f"scores{hash(layout)}", row_of(STORED)
    if layout:
        run_ranks(score_on_rank, row, layout, place, **at(row, layout))
    else:
        score_on_rank(ParallelContext.single(dtype=torch.float64), row, layout, place)
    return place


@pytest.mark.parametrize(
    "layout",
    [
        f"--world-size 4 {TP2} {CP2}",
        pytest.param(f"--world-size 4 {PP2} --micro-batch-size 1", marks=pytest.mark.slow),
        pytest.param(f"--world-size 4 {VEE} {TP2} {SP}", marks=pytest.mark.slow),
    ],
)
def test_layouts_store_what_one_rank_does(layout: str) -> None:
    """A rank that stored its part of the sequence at another place, or the top of its part of the vocabulary, gave
    every later run a teacher that nobody had trained.
    """
    expected, found = scores(), scores(layout)
    header = read_header(found)
    assert header == read_header(expected) and header.samples["train"] > 0
    for data, count in header.samples.items():
        ours, theirs = (ScoreArrays(place, header, data) for place in (found, expected))
        for number in range(count):
            assert ours.seen(number) == theirs.seen(number) != 0
            for one, other in zip(ours.row(number), theirs.row(number)):
                np.testing.assert_allclose(one, other, rtol=1e-9)


@pytest.mark.parametrize(
    "layout",
    [
        f"--world-size 4 {TP2} {CP2}",
        pytest.param(f"--world-size 4 {PP2} --zero-stage 2", marks=pytest.mark.slow),
        pytest.param(f"--world-size 2 {LOOPED} {FULL}", marks=pytest.mark.slow),
    ],
)
def test_layouts_learn_the_same_from_what_was_stored(layout: str) -> None:
    """Each rank reads the distributions of its samples and of its slice of the sequence."""
    row = f"{VARIANTS[STORED][0]} --teacher-scores {scores()}"
    check(train_at(row, layout), [train_alone(row)])
