"""Learning rate and weight decay as pure functions of the samples of all successful steps so far.

Megatron's rules and names: a checkpoint keeps the numbers that shaped its curve, and a resumed run must continue it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from megatron.config.optimizer import OptimizerConfig
from megatron.errors import CheckpointError, ConfigError
from megatron.small_files import check_kinds


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Warm-up, decay and end of the learning rate, and the course of weight decay. Lengths count samples.

    Fields have the names of Megatron-LM's checkpoints; ``lr_warmup_init``, ``lr_wsd_decay_style``,
    ``lr_wsd_decay_steps``, ``decoupled_lr`` and ``decoupled_min_lr`` are this project's.
    """

    max_lr: float
    min_lr: float
    lr_warmup_init: float
    lr_warmup_steps: float
    lr_decay_style: str
    lr_decay_steps: int
    lr_wsd_decay_style: str
    lr_wsd_decay_steps: int
    start_wd: float
    end_wd: float
    wd_incr_style: str
    wd_incr_steps: int
    decoupled_lr: float | None = None
    decoupled_min_lr: float = 0.0

    def __post_init__(self) -> None:
        if self.lr_warmup_steps >= self.lr_decay_steps:
            raise ConfigError(
                f"the learning rate would warm up over {self.lr_warmup_steps:g} samples and end its decay after "
                f"{self.lr_decay_steps}: warm-up (--lr-warmup-fraction, -iters or -samples) must be shorter than the "
                "decay (--lr-decay-iters or -samples, by default the whole training)"
            )
        if not self.min_lr <= self.max_lr:
            raise ConfigError(f"--min-lr {self.min_lr:g} is above --lr {self.max_lr:g}: it must be at most that")
        if self.lr_warmup_init > self.max_lr:
            raise ConfigError(f"--lr-warmup-init {self.lr_warmup_init:g} is above --lr {self.max_lr:g}")
        if self.lr_decay_style == "WSD" and not 0 < self.lr_wsd_decay_steps <= self.lr_decay_steps:
            raise ConfigError(
                f"--lr-decay-style WSD needs a final decay of 1 to {self.lr_decay_steps} samples, not "
                f"{self.lr_wsd_decay_steps}: set --lr-wsd-decay-iters or --lr-wsd-decay-samples"
            )

    @classmethod
    def from_config(cls, config: OptimizerConfig, *, train_samples: int, samples_per_iteration: int) -> Schedule:
        """The curves of a run of ``train_samples``; lengths given in iterations count ``samples_per_iteration`` each.

        Raises ConfigError when the settings contradict each other.
        """
        if config.lr is None:
            raise ConfigError("training needs a learning rate: set --lr")
        decay = config.lr_decay_samples or (config.lr_decay_iters or 0) * samples_per_iteration or train_samples
        warmup: float = config.lr_warmup_samples or config.lr_warmup_iters * samples_per_iteration
        if config.lr_warmup_fraction is not None:
            warmup = config.lr_warmup_fraction * decay
        constant_decay = config.weight_decay_incr_style == "constant"
        return cls(
            max_lr=config.lr,
            min_lr=config.min_lr,
            lr_warmup_init=config.lr_warmup_init,
            lr_warmup_steps=warmup,
            lr_decay_style=config.lr_decay_style,
            lr_decay_steps=decay,
            lr_wsd_decay_style=config.lr_wsd_decay_style,
            lr_wsd_decay_steps=config.lr_wsd_decay_samples or (config.lr_wsd_decay_iters or 0) * samples_per_iteration,
            start_wd=config.weight_decay if constant_decay else config.start_weight_decay,
            end_wd=config.weight_decay if constant_decay else config.end_weight_decay,
            wd_incr_style=config.weight_decay_incr_style,
            wd_incr_steps=train_samples,
            decoupled_lr=config.decoupled_lr,
            decoupled_min_lr=config.decoupled_min_lr or 0.0,
        )

    def decoupled_learning_rate(self, samples: int) -> float | None:
        """Learning rate of word embeddings and output layer, on the same curve; None without ``--decoupled-lr``."""
        if self.decoupled_lr is None:
            return None
        return dataclasses.replace(self, max_lr=self.decoupled_lr, min_lr=self.decoupled_min_lr).learning_rate(samples)

    def learning_rate(self, samples: int) -> float:
        """Learning rate of the step that begins after ``samples`` samples."""
        warmup, peak = self.lr_warmup_steps, self.max_lr
        if warmup > 0 and samples <= warmup:
            return self.lr_warmup_init + (peak - self.lr_warmup_init) * samples / warmup
        if self.lr_decay_style == "constant":
            return peak
        if samples > self.lr_decay_steps:
            return self.min_lr
        if self.lr_decay_style == "inverse-square-root":
            return max(self.min_lr, peak * math.sqrt(max(warmup, 1)) / math.sqrt(max(samples, 1)))
        return self.min_lr + (peak - self.min_lr) * self._decay_coefficient(samples)

    def _decay_coefficient(self, samples: int) -> float:
        """Position of the decay between ``min_lr`` (0) and ``max_lr`` (1)."""
        if self.lr_decay_style == "WSD":
            begin = self.lr_decay_steps - self.lr_wsd_decay_steps
            if samples <= begin:
                return 1.0
            return _falling(self.lr_wsd_decay_style, (samples - begin) / self.lr_wsd_decay_steps)
        progress = (samples - self.lr_warmup_steps) / (self.lr_decay_steps - self.lr_warmup_steps)
        return _falling(self.lr_decay_style, progress)

    def weight_decay(self, samples: int) -> float:
        """Weight decay of the step that begins after ``samples`` samples."""
        if self.wd_incr_style == "constant" or samples > self.wd_incr_steps:
            return self.end_wd
        progress = samples / self.wd_incr_steps
        risen = progress if self.wd_incr_style == "linear" else 0.5 * (math.cos(math.pi * (1 - progress)) + 1)
        return self.start_wd + (self.end_wd - self.start_wd) * risen

    def unread_fields(self) -> set[str]:
        """Fields that the chosen styles don't use."""
        unread = set()
        if self.wd_incr_style == "constant":
            unread |= {"wd_incr_steps", "start_wd"}
        if self.lr_decay_style == "constant":
            unread |= {"min_lr", "decoupled_min_lr", "lr_decay_steps"}
        if self.decoupled_lr is None:
            unread.add("decoupled_min_lr")
        if self.lr_decay_style != "WSD":
            unread |= {"lr_wsd_decay_style", "lr_wsd_decay_steps"}
        if self.lr_warmup_steps == 0:
            unread.add("lr_warmup_init")
        return unread

    def state_dict(self, samples: int) -> dict[str, Any]:
        """What a checkpoint keeps: the curves, and as ``num_steps`` the samples of all successful steps."""
        return {**dataclasses.asdict(self), "num_steps": samples}


def _falling(style: str, progress: float) -> float:
    """A factor that falls from 1 at progress 0 to 0 at progress 1."""
    if style == "linear":
        return 1.0 - progress
    if style == "cosine":
        return 0.5 * (math.cos(math.pi * progress) + 1.0)
    if style == "exponential":
        return float(2.0 * 0.5**progress - 1.0)
    assert style == "minus_sqrt", f"a decay style the flags don't offer: {style}"
    return 1.0 - math.sqrt(progress)


# Field -> the flags that set it.
_FLAGS = {
    "max_lr": "--lr",
    "min_lr": "--min-lr",
    "decoupled_lr": "--decoupled-lr",
    "decoupled_min_lr": "--decoupled-min-lr",
    "lr_warmup_init": "--lr-warmup-init",
    "lr_warmup_steps": "--lr-warmup-fraction, -iters or -samples",
    "lr_decay_style": "--lr-decay-style",
    "lr_decay_steps": "--lr-decay-iters or -samples, or the length of training",
    "lr_wsd_decay_style": "--lr-wsd-decay-style",
    "lr_wsd_decay_steps": "--lr-wsd-decay-iters or -samples",
    "start_wd": "--start-weight-decay or --weight-decay",
    "end_wd": "--end-weight-decay or --weight-decay",
    "wd_incr_style": "--weight-decay-incr-style",
    "wd_incr_steps": "the length of training",
}


def _kinds() -> dict[str, Any]:
    """The types of a schedule's fields, with the styles that flags offer."""
    flags, kinds = get_type_hints(OptimizerConfig), get_type_hints(Schedule)
    styles = ("lr_decay_style", "lr_wsd_decay_style")
    return kinds | {name: flags[name] for name in styles} | {"wd_incr_style": flags["weight_decay_incr_style"]}


def resumed_schedule(
    schedule: Schedule, saved: Mapping[str, Any], *, override: bool = False, use_checkpoint: bool = False
) -> Schedule:
    """The schedule with which a run continues, given ``schedule`` of the flags and ``saved`` of the checkpoint.

    ``override``: the flags' (``--override-opt_param-scheduler``). ``use_checkpoint``: the checkpoint's
    (``--use-checkpoint-opt_param-scheduler``). Neither: both must be equal in all fields that their styles use, else
    ConfigError lists every difference. So a run at a constant rate may be made longer.
    """
    if override:
        return schedule
    stored = {"decoupled_lr": None} | {name: value for name, value in saved.items() if name in _FLAGS}
    check_kinds(stored, _kinds(), where="the checkpoint's schedule", error=CheckpointError)
    if missing := [name for name, value in stored.items() if value is None and name != "decoupled_lr"]:
        raise CheckpointError(f"the checkpoint's schedule has no {missing[0]}, so it is damaged: choose another one")
    if use_checkpoint:
        return dataclasses.replace(schedule, **stored)
    unread = schedule.unread_fields()
    different = [name for name, value in stored.items() if getattr(schedule, name) != value and name not in unread]
    if different:
        lines = [
            f"  {name}: {getattr(schedule, name)} from the flags ({_FLAGS[name]}), {stored[name]} in the checkpoint"
            for name in different
        ]
        raise ConfigError(
            "the checkpoint was trained with another schedule than the flags describe:\n"
            + "\n".join(lines)
            + "\nkeep the checkpoint's with --use-checkpoint-opt_param-scheduler, or take the flags' with "
            "--override-opt_param-scheduler"
        )
    return schedule
