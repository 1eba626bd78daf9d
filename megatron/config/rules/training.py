"""Rules about batches, length, recomputation and evaluation."""

from __future__ import annotations

from itertools import pairwise

from megatron.config.batch_ramp import read_batch_steps
from megatron.config.family import Rule
from megatron.config.rules.sentence import rule
from megatron.config.rules.sizes import divisors, multiples_near, some
from megatron.config.run import RunConfig
from megatron.errors import ConfigError

_MOST_MICROBATCHES = 100_000


def batch_divides(run: RunConfig) -> str | None:
    """The global batch is divisible by microbatch size x data-parallel ranks."""
    total = run.training.global_batch_size
    if total % run.batch_unit == 0 or run.batch_steps:
        return None
    if run.guards.elastic:
        return (
            f"--elastic keeps --global-batch-size {total}, which {run.replicas} data-parallel ranks can't share: start "
            f"{some(divisors(total), near=run.replicas)} of them, as with torchrun --nnodes, or use "
            f"{multiples_near(total, run.replicas)}"
        )
    return f"--global-batch-size {total} is {_indivisible(run)}; use {multiples_near(total, run.batch_unit)}"


def _indivisible(run: RunConfig) -> str:
    micro, ranks = run.training.micro_batch_size, run.replicas
    return f"not divisible by --micro-batch-size {micro} x {ranks} data-parallel ranks = {run.batch_unit}"


def batch_is_countable(run: RunConfig) -> str | None:
    """The number of microbatches is bounded: the schedule of a step is computed before it runs."""
    total, unit = run.training.global_batch_size, run.batch_unit
    if total // unit <= _MOST_MICROBATCHES or run.batch_steps:
        return None
    return (
        f"--global-batch-size {total} makes {total // unit} microbatches of --micro-batch-size "
        f"{run.training.micro_batch_size} on each of {run.replicas} data-parallel ranks; use at most "
        f"{_MOST_MICROBATCHES * unit}"
    )


def ramp_is_sound(run: RunConfig) -> str | None:
    """The batch grows to the full size in whole steps, each a whole number of microbatches."""
    if run.training.rampup_batch_size is None:
        return None
    start, increment, samples = run.training.rampup_batch_size
    full, unit = run.training.global_batch_size, run.batch_unit
    asked = f"--rampup-batch-size {start} {increment} {samples}"
    if start > full:
        return f"{asked} starts above --global-batch-size {full}; start at {full} or less"
    if (full - start) % increment:
        fits = some(divisors(full - start), near=increment)
        return f"{asked} does not reach --global-batch-size {full} in whole steps; increments that fit: {fits}"
    wrong = next((size for size in run.batch_ramp.sizes[:2] if size % unit), None)  # the others follow from these
    if wrong is None:
        return None
    advice = f"use multiples of {unit} for start and increment"
    return f"{asked} comes to a batch of {wrong}, which is {_indivisible(run)}; {advice}"


def step_schedule_is_sound(run: RunConfig) -> str | None:
    """Batch sizes start at different samples, the first at 0, and each is a whole number of microbatches."""
    given, full = run.training.step_batch_size_schedule, run.training.global_batch_size
    if given is None:
        return None
    if run.training.rampup_batch_size is not None:
        return "--step-batch-size-schedule and --rampup-batch-size are mutually exclusive; keep one"
    text = " ".join(given)
    asked = f"--step-batch-size-schedule '{text}'"
    try:
        entries = read_batch_steps(text)
    except ConfigError as error:
        return f"{asked} {error}"
    steps, unit = run.batch_steps, run.batch_unit
    if steps[0][0] > 0:
        return f"{asked} has no batch size for the first {entries[0][0]} tokens; begin with 0:{steps[0][1]}"
    same = next((pair for pair, two in zip(pairwise(entries), pairwise(steps)) if two[0][0] == two[1][0]), None)
    if same is not None:
        return (
            f"{asked} has two sizes from the same sample on, at {same[0][0]} and {same[1][0]} tokens; keep one, or set "
            f"them at least --seq-length {run.data.seq_length} apart"
        )
    if full != steps[-1][1]:
        return f"--global-batch-size {full} is not the last size of {asked}; leave it out, or give {steps[-1][1]}"
    wrong = next((size for _, size in steps if size % unit or size // unit > _MOST_MICROBATCHES), None)
    if wrong is None:
        return None
    if wrong % unit == 0:
        return f"{asked} makes {wrong // unit} microbatches a step; use sizes of at most {_MOST_MICROBATCHES * unit}"
    return f"{asked} has a batch of {wrong}, which is {_indivisible(run)}; use {multiples_near(wrong, unit)}"


def iterations_to_skip_are_numbers(run: RunConfig) -> str | None:
    """Iterations to pass over are numbers or ranges, in a run that takes steps."""
    asked = f"--iterations-to-skip {' '.join(run.training.iterations_to_skip)}"
    try:
        skipped = run.training.skipped_iterations
    except ValueError:
        return f"{asked} must be numbers of iterations or ranges of them, from 1 on, as in 120 101-200"
    if skipped and run.purpose.trains_in_epochs:
        return f"{asked} is not available with epochs; leave it out"
    return None


def samples_make_a_step(run: RunConfig) -> str | None:
    """--train-samples are at least one global batch."""
    samples, full = run.training.train_samples, run.batch_ramp.size_at(0)
    if samples is None or run.training.skip_train or samples >= full:
        return None
    return f"--train-samples {samples} is less than one global batch of {full}; give at least {full}"


def modules_to_recompute_exist(run: RunConfig) -> str | None:
    """What is named for recomputation is a part of the model."""
    modules, parts = run.training.recompute_modules, dict.fromkeys(("moe", "moe_act", "shared_experts"), "experts")
    parts |= {"mamba": "Mamba-2 layers", "gated_delta_net": "gated delta nets"}
    for part in run.parts:
        parts |= part.recompute_modules()
    lacking = {
        **parts,
        "layernorm": "" if run.model.norm_placement != "after" else "a norm before them (--norm-placement before)",
        "mla_up_proj": "" if run.model.multi_latent_attention else "--multi-latent-attention",
    }
    named = [f"{module} without {lacking[module]}" for module in modules if lacking.get(module)]
    is_asked = named and run.training.selected_modules
    return f"--recompute-modules names {' and '.join(named)}; leave it out" if is_asked else None


RULES: tuple[Rule, ...] = (
    batch_divides,
    batch_is_countable,
    ramp_is_sound,
    step_schedule_is_sound,
    rule(
        "--train-iters {run.training.train_iters} and --train-samples {run.training.train_samples} are mutually "
        "exclusive; keep one",
        lambda run: run.training.train_iters is not None and run.training.train_samples is not None,
    ),
    rule(
        "the run has no length: give --train-iters or --train-samples",
        lambda run: (
            run.training.train_iters is None
            and run.training.train_samples is None
            and not (run.training.skip_train or run.purpose.trains_in_epochs)
        ),
    ),
    rule(
        "--train-iters 0 trains nothing; give at least 1, or --skip-train to evaluate alone",
        lambda run: run.training.train_iters == 0 and not run.training.skip_train,
    ),
    iterations_to_skip_are_numbers,
    samples_make_a_step,
    rule(
        "--recompute-method {run.training.recompute_method} needs --recompute-granularity full",
        lambda run: run.training.recompute_method is not None and run.training.recompute_granularity != "full",
    ),
    modules_to_recompute_exist,
    rule(
        "--recompute-modules layernorm saves nothing with --apply-residual-connection-post-layernorm, where results of "
        "norms are the residual stream; leave one out",
        lambda run: "layernorm" in run.training.selected_modules and run.model.apply_residual_connection_post_layernorm,
    ),
    rule(
        "--cpu-offloading cannot be combined with --recompute-modules layernorm, which keeps the inputs of norms "
        "itself; leave one out",
        lambda run: run.training.cpu_offloading and "layernorm" in run.training.selected_modules,
    ),
    rule(
        "--cpu-offloading-num-layers {run.training.cpu_offloading_num_layers} is more than --num-layers "
        "{run.model.num_layers}; use at most {run.model.num_layers}",
        lambda run: (run.training.cpu_offloading_num_layers or 0) > run.model.num_layers,
    ),
    rule(
        "--cpu-offloading-num-layers 0 offloads no layer, and --cpu-offloading asks for it; leave one out",
        lambda run: run.training.cpu_offloading and run.training.cpu_offloading_num_layers == 0,
    ),
    rule(
        "--recompute-activations means --recompute-granularity selective, which excludes full; keep one",
        lambda run: run.training.recompute_activations and run.training.recompute_granularity == "full",
    ),
    rule(
        "--recompute-num-layers {run.training.recompute_num_layers} is more than --num-layers "
        "{run.model.num_layers}; use at most {run.model.num_layers}",
        lambda run: (run.training.recompute_num_layers or 0) > run.model.num_layers,
    ),
    rule(
        "--skip-train with --eval-iters 0 leaves nothing to do; give --eval-iters",
        lambda run: run.training.skip_train and run.training.eval_iters == 0,
    ),
)
