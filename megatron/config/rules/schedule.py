"""Rules about the schedules of learning rate and weight decay."""

from __future__ import annotations

from megatron.config.family import Rule
from megatron.config.flags import flag_of
from megatron.config.optimizer import pattern_and_factor
from megatron.config.rules.sentence import rule
from megatron.config.rules.sizes import LENGTHS, length_in
from megatron.config.run import RunConfig


def learning_rates_are_ordered(run: RunConfig) -> str | None:
    """Learning rates at the end of the decay and at the start of the warm-up are at most the highest."""
    optimizer = run.optimizer
    for name, highest, least in (
        ("lr", optimizer.lr, optimizer.min_lr),
        ("decoupled-lr", optimizer.decoupled_lr, optimizer.decoupled_min_lr),
    ):
        for flag, value in (
            (f"--{name.replace('lr', 'min-lr')}", least),
            ("--lr-warmup-init", optimizer.lr_warmup_init),
        ):
            if highest is not None and value is not None and value > highest:
                return f"{flag} {value:g} is more than --{name} {highest:g}; use at most {highest:g}"
    return None


def learning_rate_factors_are_numbers(run: RunConfig) -> str | None:
    """Each learning-rate multiplier is a pattern and a positive number."""
    for pair in run.optimizer.lr_multipliers:
        try:
            pattern_and_factor(pair)
        except ValueError:
            return (
                f"--lr-multipliers {pair} is not PATTERN=FACTOR with a finite factor above 0, such as "
                "'embedding.*=0.1'; parameters that must keep their values are named with --freeze"
            )
    return None


def one_unit_each(run: RunConfig) -> str | None:
    """A length is given in iterations or in samples."""
    for name in LENGTHS:
        iters, samples = (getattr(run.optimizer, f"{name}_{unit}") for unit in ("iters", "samples"))
        if iters and samples:
            flag = flag_of(name)
            return f"{flag}-iters {iters} and {flag}-samples {samples} are mutually exclusive; keep one"
    return None


def one_warmup(run: RunConfig) -> str | None:
    """The warm-up is given once."""
    optimizer = run.optimizer
    if optimizer.lr_warmup_fraction is None:
        return None
    lengths = {"iters": optimizer.lr_warmup_iters, "samples": optimizer.lr_warmup_samples}
    given = next((f"--lr-warmup-{unit} {length}" for unit, length in lengths.items() if length), None)
    asked = f"--lr-warmup-fraction {optimizer.lr_warmup_fraction:g}"
    return given and f"{asked} and {given} are mutually exclusive; keep one"


def warmup_ends_before_decay(run: RunConfig) -> str | None:
    """The warm-up is shorter than the decay it is part of."""
    unit, decay = _decay(run)
    warmup = length_in(run, unit, "lr_warmup")
    if not unit or warmup == 0 or warmup < decay:
        return None
    return (
        f"--lr-warmup-{unit} {warmup} is not shorter than the decay of {decay} {unit}; "
        f"use less than {decay}, or set --lr-decay-{unit}"
    )


def wsd_decay_is_sound(run: RunConfig) -> str | None:
    """The final decay of WSD is given with WSD, only with it, and lies inside the decay."""
    optimizer, unit, decay = run.optimizer, *_decay(run)
    length = length_in(run, unit, "lr_wsd_decay")
    if optimizer.lr_decay_style != "WSD":
        if not length:
            return None
        return f"--lr-wsd-decay-{unit} {length} has no effect with --lr-decay-style {optimizer.lr_decay_style}; use WSD"
    if unit and not length:
        return f"--lr-decay-style WSD needs --lr-wsd-decay-{unit}, the length of its final decay"
    if unit and length > decay:
        return f"--lr-wsd-decay-{unit} {length} is longer than the decay of {decay} {unit}; use at most {decay}"
    return None


def weight_decay_is_given_once(run: RunConfig) -> str | None:
    """A constant weight decay has one value, a changing one a first and a last."""
    optimizer = run.optimizer
    if optimizer.weight_decay_incr_style == "constant":
        if optimizer.start_weight_decay == optimizer.end_weight_decay == optimizer.weight_decay:
            return None
        return (
            "--start-weight-decay and --end-weight-decay have no effect with --weight-decay-incr-style constant; "
            "use linear or cosine, or --weight-decay alone"
        )
    if optimizer.end_weight_decay < optimizer.start_weight_decay:
        return (
            f"--end-weight-decay {optimizer.end_weight_decay:g} is less than --start-weight-decay "
            f"{optimizer.start_weight_decay:g}; weight decay can only grow"
        )
    if optimizer.end_weight_decay == optimizer.start_weight_decay:
        return (
            f"--weight-decay-incr-style {optimizer.weight_decay_incr_style} needs --start-weight-decay and a larger "
            "--end-weight-decay"
        )
    return None


def _decay(run: RunConfig) -> tuple[str, int]:
    """Unit (``iters``, ``samples``, or empty for a run without length) and length of the decay."""
    if run.training.train_iters is not None:
        return "iters", length_in(run, "iters", "lr_decay") or run.training.train_iters
    if run.training.train_samples is not None:
        return "samples", length_in(run, "samples", "lr_decay") or run.training.train_samples
    return "", 0


RULES: tuple[Rule, ...] = (
    rule(
        "training needs a learning rate: give --lr",
        lambda run: run.optimizer.lr is None and not run.training.skip_train,
    ),
    learning_rates_are_ordered,
    learning_rate_factors_are_numbers,
    one_unit_each,
    one_warmup,
    warmup_ends_before_decay,
    wsd_decay_is_sound,
    weight_decay_is_given_once,
    rule(
        "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler are mutually exclusive; keep one",
        lambda run: run.optimizer.override_opt_param_scheduler and run.optimizer.use_checkpoint_opt_param_scheduler,
    ),
)
