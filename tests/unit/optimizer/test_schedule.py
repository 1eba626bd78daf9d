"""Learning rate and weight decay: Megatron-LM's curves to the last digit, and no silent change of curve on resume."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron.config.optimizer import OptimizerConfig
from megatron.core.optimizer.schedule import Schedule, resumed_schedule
from megatron.errors import ConfigError
from tests.harness.sentences import check_line, expect_error

GOLDEN: dict[str, list[list[float]]] = json.loads(
    (Path(__file__).parents[2] / "golden" / "lr_v012.json").read_text(encoding="utf-8")
)


def golden_config(**changes: Any) -> OptimizerConfig:
    """The settings that the golden values were recorded with."""
    settings: dict[str, Any] = {
        "lr": 1e-3,
        "min_lr": 1e-4,
        "lr_warmup_init": 1e-5,
        "lr_warmup_samples": 80,
        "lr_decay_samples": 800,
        "lr_wsd_decay_samples": 200,
        "start_weight_decay": 0.01,
        "end_weight_decay": 0.1,
        "weight_decay_incr_style": "cosine",
        **changes,
    }
    return OptimizerConfig(**settings)


def golden_schedule(**changes: Any) -> Schedule:
    return Schedule.from_config(golden_config(**changes), train_samples=1000, samples_per_iteration=8)


@pytest.mark.parametrize("styles", GOLDEN)
def test_curves_equal_megatron(styles: str) -> None:
    """A run started with a Megatron-LM launch script would train at another learning rate than there."""
    style, wsd_style = styles.split("/")
    wsd: dict[str, Any] = {} if wsd_style == "None" else {"lr_wsd_decay_style": wsd_style}
    schedule = golden_schedule(lr_decay_style=style, **wsd)
    for samples, lr, weight_decay in GOLDEN[styles]:
        assert schedule.learning_rate(int(samples)) == pytest.approx(lr, rel=0, abs=1e-12)
        assert schedule.weight_decay(int(samples)) == pytest.approx(weight_decay, rel=0, abs=1e-12)


def test_minus_sqrt_falls_from_peak_to_floor() -> None:
    """The WSD style that the golden file lacks: 1 - sqrt of the progress through the final decay."""
    schedule = golden_schedule(lr_decay_style="WSD", lr_wsd_decay_style="minus_sqrt")
    assert schedule.learning_rate(600) == 1e-3
    assert schedule.learning_rate(650) == pytest.approx(1e-4 + 9e-4 * 0.5, abs=1e-15)
    assert schedule.learning_rate(800) == pytest.approx(1e-4, abs=1e-15)
    assert schedule.learning_rate(801) == 1e-4


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse-square-root", "WSD"])
def test_curves_stay_between_floor_and_peak(style: str) -> None:
    """A curve that leaves [min, max], or jumps, would throw a run off at one step."""
    schedule = golden_schedule(lr_decay_style=style)
    rates = [schedule.learning_rate(samples) for samples in range(80, 1200)]
    assert all(1e-4 <= rate <= 1e-3 for rate in rates)
    assert rates == sorted(rates, reverse=True)


def test_decoupled_rates_are_on_the_same_curve() -> None:
    """Word embeddings and output layer: their own highest and lowest rate, at the shape and lengths of the others."""
    schedule = golden_schedule(decoupled_lr=5e-3, decoupled_min_lr=1e-3)
    assert golden_schedule().decoupled_learning_rate(100) is None
    for samples in (0, 40, 80, 500, 800, 900):
        assert schedule.learning_rate(samples) == golden_schedule().learning_rate(samples)
        alone = golden_schedule(lr=5e-3, min_lr=1e-3)
        assert schedule.decoupled_learning_rate(samples) == alone.learning_rate(samples)
    old = {name: value for name, value in golden_schedule().state_dict(0).items() if not name.startswith("decoupled")}
    assert resumed_schedule(golden_schedule(), old) == golden_schedule()
    with expect_error(ConfigError, "decoupled_lr", "0.005", "--decoupled-lr"):
        resumed_schedule(schedule, old)


def test_weight_decay_linear_and_constant() -> None:
    """Weight decay would keep growing after the end of training, or follow start and end where it is constant."""
    linear = golden_schedule(weight_decay_incr_style="linear")
    assert [linear.weight_decay(n) for n in (0, 500, 1000, 2000)] == pytest.approx([0.01, 0.055, 0.1, 0.1])
    constant = golden_schedule(weight_decay_incr_style="constant", weight_decay=0.3)
    assert {constant.weight_decay(n) for n in (0, 500, 2000)} == {0.3}


def test_lengths_in_iterations_count_samples() -> None:
    """Warm-up and decay given in iterations would be off by the batch size."""
    config = OptimizerConfig(lr=1.0, lr_decay_iters=100, lr_warmup_iters=10, lr_wsd_decay_iters=20)
    schedule = Schedule.from_config(config, train_samples=4000, samples_per_iteration=8)
    assert (schedule.lr_warmup_steps, schedule.lr_decay_steps, schedule.lr_wsd_decay_steps) == (80, 800, 160)
    assert schedule.wd_incr_steps == 4000
    by_default = Schedule.from_config(OptimizerConfig(lr=1.0), train_samples=4000, samples_per_iteration=8)
    assert (by_default.lr_warmup_steps, by_default.lr_decay_steps) == (0, 4000)


def test_warmup_fraction_is_of_the_decay() -> None:
    """--lr-warmup-fraction 0.1 would warm up over a tenth of something else."""
    config = OptimizerConfig(lr=1.0, lr_warmup_fraction=0.01, lr_decay_iters=50)
    schedule = Schedule.from_config(config, train_samples=100_000, samples_per_iteration=4)
    assert schedule.lr_warmup_steps == 2.0
    assert [schedule.learning_rate(n) for n in (0, 1, 2)] == [0.0, 0.5, 1.0]


def test_without_warmup_the_first_step_runs_at_the_peak() -> None:
    """The first step of a run without warm-up would be lost."""
    schedule = Schedule.from_config(OptimizerConfig(lr=1.0), train_samples=10, samples_per_iteration=1)
    assert schedule.learning_rate(0) == 1.0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"lr": None}, ["--lr"]),
        ({"lr_warmup_samples": 800}, ["800 samples", "--lr-warmup-fraction", "--lr-decay-iters"]),
        ({"min_lr": 0.1}, ["--min-lr 0.1", "--lr 0.001"]),
        ({"lr_warmup_init": 0.1}, ["--lr-warmup-init 0.1"]),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_samples": None}, ["WSD", "--lr-wsd-decay-samples"]),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_samples": 801}, ["801", "--lr-wsd-decay-iters"]),
    ],
)
def test_impossible_curves_are_refused(changes: dict[str, Any], named: list[str]) -> None:
    """A division by zero, or a curve that rises, instead of a sentence that names the flags."""
    with expect_error(ConfigError, *named):
        golden_schedule(**changes)


def test_resume_with_equal_flags_continues() -> None:
    """A checkpoint written by the same command would be refused, also after a trip through JSON."""
    schedule = golden_schedule(lr_decay_style="WSD", lr_warmup_samples=0, lr_warmup_fraction=1 / 3)
    saved = json.loads(json.dumps(schedule.state_dict(320)))
    assert resumed_schedule(schedule, saved) == schedule


def test_resume_with_other_flags_lists_every_difference() -> None:
    """The learning rate would silently jump on resume, or the message would hide which flag to change."""
    saved = golden_schedule().state_dict(320)
    flags = golden_schedule(lr=2e-3, lr_decay_samples=900)
    with pytest.raises(ConfigError) as caught:
        resumed_schedule(flags, saved)
    message = str(caught.value)
    check_line(message, "max_lr", "0.002", "--lr", "0.001")
    assert "lr_decay_steps: 900" in message
    check_line(message, "checkpoint", "800")
    assert "min_lr:" not in message
    assert "--use-checkpoint-opt_param-scheduler" in message
    assert "--override-opt_param-scheduler" in message


def test_resume_overlooks_what_no_curve_reads() -> None:
    """A run at a constant rate could not be made longer, because the length it doesn't depend on had changed."""

    def constant(length: int, **changes: Any) -> Schedule:
        settings = OptimizerConfig(lr=1e-3, lr_decay_style="constant", weight_decay=0.1, **changes)
        return Schedule.from_config(settings, train_samples=length, samples_per_iteration=1)

    longer = constant(200)
    assert resumed_schedule(longer, constant(100).state_dict(50)) == longer
    with expect_error(ConfigError, "end_wd", "0.2"):
        resumed_schedule(longer, {**constant(100).state_dict(50), "end_wd": 0.2})
    with expect_error(ConfigError, "lr_warmup_init", "0.0001"):
        resumed_schedule(
            constant(200, lr_warmup_samples=10), constant(100, lr_warmup_samples=10, lr_warmup_init=1e-4).state_dict(5)
        )


def test_unread_fields_change_no_curve() -> None:
    """Overlooking a field that matters would let the rate jump on resume."""
    for style in ("constant", "linear", "cosine", "inverse-square-root", "WSD"):
        for decay_style in ("constant", "linear"):
            schedule = golden_schedule(lr_decay_style=style, weight_decay_incr_style=decay_style, lr_warmup_samples=0)
            for name in schedule.unread_fields():
                value = getattr(schedule, name)
                other: Any = "linear" if isinstance(value, str) else value / 2
                changed = dataclasses.replace(schedule, **{name: other})
                for samples in (0, 1, 300, 700, 5000):
                    assert changed.learning_rate(samples) == schedule.learning_rate(samples), name
                    assert changed.weight_decay(samples) == schedule.weight_decay(samples), name


def test_resume_can_take_either_side() -> None:
    """The flag that settles a difference would settle it the wrong way round."""
    stored, flags = golden_schedule(), golden_schedule(lr=2e-3)
    saved = stored.state_dict(320)
    assert resumed_schedule(flags, saved, override=True) == flags
    assert resumed_schedule(flags, saved, use_checkpoint=True) == stored


def test_cosine_halfway() -> None:
    """A phase error in the cosine that the golden points happen to miss."""
    schedule = Schedule.from_config(
        OptimizerConfig(lr=1.0, lr_decay_style="cosine"), train_samples=1000, samples_per_iteration=1
    )
    assert schedule.learning_rate(250) == pytest.approx(0.5 * (1 + math.sqrt(0.5)), abs=1e-15)
