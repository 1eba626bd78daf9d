"""The dynamic loss scale: Megatron-LM's rule, including that its patience is refilled only by growth."""

from __future__ import annotations

import itertools

from megatron.config.precision import PrecisionConfig
from megatron.core.optimizer.loss_scaler import DynamicLossScaler, LossScaler, build_loss_scaler


def scaler(**changes: float) -> DynamicLossScaler:
    settings = {"scale": 1024.0, "min_scale": 1.0, "window": 3, "hysteresis": 2, **changes}
    return DynamicLossScaler(**settings)  # type: ignore[arg-type]


def scales(tested: DynamicLossScaler, steps: str) -> list[float]:
    """Scale after each step: ``.`` is a good step, ``x`` an overflow."""
    found = []
    for step in steps:
        tested.update(overflow=step == "x")
        found.append(tested.scale)
    return found


def test_grows_after_a_window_of_good_steps() -> None:
    """The scale would stay too low, and small gradients would be lost in fp16."""
    assert scales(scaler(), "......") == [1024, 1024, 2048, 2048, 2048, 4096]


def test_one_overflow_is_forgiven() -> None:
    """With hysteresis 2, a single overflow would halve the scale."""
    assert scales(scaler(), "x") == [1024]


def test_further_overflows_halve_each_time() -> None:
    """Patience is refilled only by growth: once used up, every overflow halves, good steps between or not."""
    assert scales(scaler(), "xxx.x..x") == [1024, 512, 256, 256, 128, 128, 128, 64]


def test_growth_refills_patience() -> None:
    """After the scale has grown, one overflow must be forgiven again."""
    assert scales(scaler(), "xx...xx") == [1024, 512, 512, 512, 1024, 1024, 512]


def test_an_overflow_restarts_the_window() -> None:
    """Good steps before an overflow would count towards growth."""
    assert scales(scaler(), "..x..") == [1024, 1024, 1024, 1024, 1024]


def test_never_below_the_minimum() -> None:
    """The scale would sink towards zero, and gradients with it."""
    assert scales(scaler(scale=4.0, min_scale=2.0), "xxxx") == [4, 2, 2, 2]


def test_every_short_history_resumes_exactly() -> None:
    """A resumed fp16 run would scale differently than an uninterrupted one."""
    for steps in itertools.product(".x", repeat=6):
        whole, first, second = scaler(), scaler(), scaler()
        scales(whole, "".join(steps))
        scales(first, "".join(steps[:3]))
        second.load_state_dict(first.state_dict())
        scales(second, "".join(steps[3:]))
        assert second == whole


def test_flags_choose_the_scaler() -> None:
    """bf16 needs no scale; fp16 takes --loss-scale, or finds its own from --initial-loss-scale on."""
    assert build_loss_scaler(PrecisionConfig(bf16=True, loss_scale=8.0)) == LossScaler(1.0)
    assert build_loss_scaler(PrecisionConfig()) == LossScaler(1.0)
    assert build_loss_scaler(PrecisionConfig(fp16=True, loss_scale=8.0)) == LossScaler(8.0)
    dynamic = build_loss_scaler(PrecisionConfig(fp16=True))
    assert isinstance(dynamic, DynamicLossScaler)
    assert (dynamic.scale, dynamic.min_scale, dynamic.window, dynamic.hysteresis) == (2.0**32, 1.0, 1000.0, 2)


def test_a_constant_scale_ignores_overflows_and_checkpoints() -> None:
    """--loss-scale would drift after an overflow or be replaced by a checkpoint's dynamic scale."""
    constant = LossScaler(8.0)
    constant.update(overflow=True)
    constant.load_state_dict(scaler().state_dict())
    assert constant.scale == 8.0
    assert constant.state_dict() == {}
    dynamic = scaler()
    dynamic.load_state_dict({})
    assert dynamic == scaler()
