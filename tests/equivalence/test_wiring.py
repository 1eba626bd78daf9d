"""Mistakes in how a run is put together, made on purpose on the ranks alone: the table sees each of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import pytest

from megatron.core.distributed.grad_sync import GradSync
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.low_precision import LowPrecision
from megatron.core.parallel.weight_gradients import WeightGradients
from megatron.core.tensor_parallel.delayed_scaling import DelayedScaling
from megatron.errors import ParallelError
from megatron.training.evaluation.parity import Observed
from megatron.training.run import run, stages, training_state
from tests.equivalence import test_fp8, test_freezing
from tests.equivalence.flags import FUSED, PP2, SMALL, TP2, VEE, ZB_H1, ZERO_OVERLAPPED
from tests.equivalence.test_equivalence import check
from tests.equivalence.training import at, train, train_alone
from tests.harness import RanksError, run_ranks
from tests.tiers import tiers

Fault = Callable[[], AbstractContextManager[Any]]


def built_with(name: str, **changes: Any) -> AbstractContextManager[Any]:
    """``build_run`` with other arguments for one of its parts."""
    place = training_state if hasattr(training_state, name) else run
    usual = getattr(place, name)
    return mock.patch.object(place, name, lambda *given, **options: usual(*given, **{**options, **changes}))


def without(owner: type | Any, name: str) -> AbstractContextManager[Any]:
    """A function that does nothing."""
    return mock.patch.object(owner, name, return_value=None)


DEEP, TWO_STAGES = f"{SMALL} --num-layers 5", f"--world-size 2 {PP2} {ZB_H1}"
GATHERED = f"--world-size 2 {ZERO_OVERLAPPED} --ddp-bucket-size 3000 --fp8-param-gather"
FAULTS: dict[str, tuple[str, str, Fault]] = {
    "no fault": (DEEP, TWO_STAGES, nullcontext),
    "tied copies of a rank are two parameters": (
        DEEP,
        f"--world-size 2 {VEE}",
        functools.partial(without, stages, "share_tied_parameters"),
    ),
    "layers are built before the schedule is known": (
        DEEP,
        TWO_STAGES,
        functools.partial(mock.patch.object, run, "WeightGradients", lambda **given: WeightGradients()),
    ),
    "the runner has no postponed gradients": (
        DEEP,
        TWO_STAGES,
        functools.partial(built_with, "Runner", weight_gradients=None),
    ),
    "gradient sync adds up elsewhere than layers": (
        SMALL,
        f"--world-size 2 {TP2} {FUSED}",
        functools.partial(built_with, "GradSync", weight_gradients=WeightGradients(fuses_accumulation=True)),
    ),
    "buffers don't know what is frozen": (
        test_freezing.VARIANTS["embedding"],
        f"--world-size 2 {TP2}",
        functools.partial(built_with, "build_buffers", policies={}),
    ),
    "gradients stay on their ranks": (SMALL, "--world-size 2", functools.partial(without, GradSync, "finish")),
    "gradients of the step before stay": (SMALL, f"--world-size 2 {TP2}", functools.partial(without, GradSync, "zero")),
    "layers look elsewhere for gathered weights": (
        test_fp8.VARIANTS["tensorwise"],
        GATHERED,
        functools.partial(built_with, "Optimizer", low_precision=LowPrecision()),
    ),
    "the runner marks no steps": (
        test_fp8.VARIANTS["delayed"],
        f"--world-size 2 {TP2}",
        functools.partial(built_with, "Runner", low_precision=LowPrecision()),
    ),
    "delayed scales are not updated": (
        test_fp8.VARIANTS["delayed"],
        f"--world-size 2 {TP2}",
        functools.partial(without, DelayedScaling, "update"),
    ),
    "delayed scaling has not seen the models": (
        test_fp8.VARIANTS["delayed"],
        f"--world-size 2 {TP2}",
        functools.partial(mock.patch.object, run, "delayed_scaling", return_value=None),
    ),
}
FIRST = ("no fault", "tied copies of a rank are two parameters", "gradient sync adds up elsewhere than layers")


def train_with(context: ParallelContext, fault: str, row: str, layout: str) -> Observed:
    """The table's steps of a run that is put together with the fault."""
    with FAULTS[fault][2]():
        return train(context, row, layout)


@pytest.mark.parametrize("fault", tiers(FAULTS, first=FIRST))
def test_the_table_sees_how_a_run_is_put_together(fault: str) -> None:
    """It had a wiring of its own, so that a wrong order of calls in ``build_run`` went through all of its rows."""
    row, layout, _ = FAULTS[fault]
    caught = nullcontext() if fault == "no fault" else pytest.raises((AssertionError, ParallelError, RanksError))
    alone = train_alone(row)
    with caught:
        check(run_ranks(train_with, fault, row, layout, **at(row, layout)), [alone])
