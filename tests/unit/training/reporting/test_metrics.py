"""The log line is parsed by people's scripts: every character counts. And its means must mean what they say."""

from __future__ import annotations

import dataclasses
import math
from datetime import datetime

import pytest

from megatron.core.inference.scoring import perplexity
from megatron.training.reporting.metrics import (
    IntervalTotals,
    StepRecord,
    training_line,
    validation_block,
)

STEP = StepRecord(
    iteration=100,
    consumed_samples=1600,
    global_batch_size=16,
    losses={"lm loss": 5.4321},
    learning_rate=1.5e-4,
    loss_scale=65536.0,
)
NOW = datetime(2026, 8, 1, 9, 5, 3)


def line(step: StepRecord, *others: StepRecord, tflops: float | None = None) -> str:
    totals = IntervalTotals()
    for each in (*others, step):
        totals.add(each)
    return training_line(
        step, totals, time=NOW, train_iters=5000, seconds_per_iteration=0.12345, tflops_per_device=tflops
    )


def test_shortest_line_to_the_letter() -> None:
    assert line(STEP) == (
        " [2026-08-01 09:05:03] iteration      100/    5000 | consumed samples:         1600 | "
        "elapsed time per iteration (ms): 123.5 | learning rate: 1.500000E-04 | global batch size:    16 | "
        "lm loss: 5.432100E+00 | loss scale: 65536.0 | number of skipped iterations:   0 | "
        "number of nan iterations:   0 | time left: 0:10:05 |"
    )


def test_the_time_left_ends_with_the_run() -> None:
    """A newcomer worked it out from the time per iteration; the fields of Megatron-LM's line stand before it."""
    assert line(dataclasses.replace(STEP, iteration=5000)).endswith("number of nan iterations:   0 |")


@pytest.mark.parametrize(
    ("left", "words"),
    [(1, "0:00:01"), (90061, "1 day, 1:01:01"), (172800, "2 days, 0:00:00"), (2**53, "104249991374 days, 7:36:32")],
)
def test_the_time_left_may_be_longer_than_a_calendar(left: int, words: str) -> None:
    """A run whose end is left to --exit-interval (--train-iters 9007199254740992) ended in an OverflowError."""
    totals = IntervalTotals()
    totals.add(STEP)
    said = training_line(STEP, totals, time=NOW, train_iters=STEP.iteration + left, seconds_per_iteration=1.0)
    assert said.endswith(f"time left: {words} |")


@pytest.mark.parametrize(
    ("tflops", "words"), [(0.00013264, "0.000133"), (0.0, "0.0"), (0.9994, "0.999"), (1.0, "1.0"), (412.345, "412.3")]
)
def test_no_throughput_is_rounded_to_zero(tflops: float, words: str) -> None:
    """Every line of a run on a CPU said ``throughput per GPU (TFLOP/s/GPU): 0.0``."""
    assert f"throughput per GPU (TFLOP/s/GPU): {words} |" in line(STEP, tflops=tflops)


def test_longest_line_to_the_letter() -> None:
    step = dataclasses.replace(
        STEP,
        grad_norm=1.2344,
        num_zeros=42,
        params_norm=170.5551,
        decoupled_learning_rate=5e-4,
        losses={"lm loss": 5.4321, "sop loss": 0.7},
    )
    assert line(step, tflops=123.456) == (
        " [2026-08-01 09:05:03] iteration      100/    5000 | consumed samples:         1600 | "
        "elapsed time per iteration (ms): 123.5 | "
        "throughput per GPU (TFLOP/s/GPU): 123.5 | learning rate: 1.500000E-04 | "
        "decoupled learning rate: 5.000000E-04 | global batch size:    16 | lm loss: 5.432100E+00 | "
        "sop loss: 7.000000E-01 | loss scale: 65536.0 | grad norm: 1.234 | num zeros: 42 | params norm: 170.555 | "
        "number of skipped iterations:   0 | number of nan iterations:   0 | time left: 0:10:05 |"
    )


def test_loss_is_the_mean_over_iterations_that_were_not_skipped() -> None:
    """A skipped step's loss would bias the mean, and a skipped infinity would hide all the others."""
    skipped = dataclasses.replace(STEP, losses={"lm loss": math.inf}, skipped=True)
    text = line(
        dataclasses.replace(STEP, losses={"lm loss": 4.0}), dataclasses.replace(STEP, losses={"lm loss": 6.0}), skipped
    )
    assert "| lm loss: 5.000000E+00 |" in text
    assert "number of skipped iterations:   1 | number of nan iterations:   1 |" in text


def test_skipped_but_finite_loss_is_no_nan_iteration() -> None:
    text = line(STEP, dataclasses.replace(STEP, skipped=True, losses={"lm loss": 9.0}))
    assert "lm loss: 5.432100E+00" in text
    assert "number of skipped iterations:   1 | number of nan iterations:   0 |" in text


@pytest.mark.parametrize("loss", [0.0, -1.0, math.nan])
def test_loss_that_is_not_above_zero_is_left_out(loss: float) -> None:
    assert "lm loss" not in line(dataclasses.replace(STEP, losses={"lm loss": loss}))


def test_means_that_are_no_losses_may_be_below_zero() -> None:
    """Rewards of answers sink below 0 in training on preferences, and the line left them out."""
    assert "rewards/rejected: -1.500000E+00" in line(dataclasses.replace(STEP, losses={"rewards/rejected": -1.5}))


def test_nan_with_the_check_off_is_counted_though_not_skipped() -> None:
    """The run goes on with ruined weights: the line must say so."""
    text = line(dataclasses.replace(STEP, losses={"lm loss": math.nan}))
    assert "number of skipped iterations:   0 | number of nan iterations:   1 |" in text


def test_only_skipped_iterations_leave_no_loss() -> None:
    assert "lm loss" not in line(dataclasses.replace(STEP, skipped=True))


def test_validation_block_to_the_letter() -> None:
    rule, text, again = validation_block("iteration 50", {"lm loss": 2.0, "sop loss": 0.5}).split("\n")
    assert text == (
        " validation loss at iteration 50 | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 | "
        "sop loss value: 5.000000E-01 | sop loss PPL: 1.648721E+00 | "
    )
    assert rule == again == "-" * (len(text) + 1)


def test_the_batches_of_an_evaluation_come_last() -> None:
    """Two losses of one iteration differed, and nothing said that they are of different batches."""
    assert validation_block("iteration 5", {"accuracy": 0.5}, batches="batches: 9 to 16").split("\n")[1] == (
        " validation loss at iteration 5 | accuracy value: 5.000000E-01 | batches: 9 to 16 | "
    )


def test_an_accuracy_has_no_perplexity() -> None:
    assert " | accuracy value: 5.000000E-01 | \n" in validation_block("iteration 5", {"lm loss": 2.0, "accuracy": 0.5})


def test_perplexity_is_capped() -> None:
    assert perplexity(1e6) == math.exp(20)
