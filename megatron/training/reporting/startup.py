"""The report at the start of a run: model, layout, length, and every setting that isn't the default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron.config.flags import plural_s
from megatron.config.report import count, describe_model, settings_report, stages_report
from megatron.config.run import RunConfig
from megatron.training.reporting.hybrid_flops import megatron_lm_flops


@dataclass(frozen=True, kw_only=True)
class StartupFacts:
    """Facts for the report that are not in the settings.

    ``parameters``: of the whole model; ``parameters_here``: of this rank; ``active``: that take part for
    one token; ``frozen``: of the whole model, not trained.
    ``uncounted``: classes of modules whose FLOPs are missing. ``attention``: the backend, and why others were
    refused; ``mixers``: those of other mixers, by what they compute.
    ``fp8``: which layers multiply in it, and by what.
    """

    model_name: str
    device: str
    parameters: int
    parameters_here: int
    active: int = 0
    frozen: int = 0
    flops_per_sample: float
    uncounted: frozenset[str] = frozenset()
    start_iteration: int = 0
    loaded_from: str | None = None
    attention: str = "auto"
    mixers: Mapping[str, str] = field(default_factory=dict)
    fp8: str = ""


def startup_report(run: RunConfig, facts: StartupFacts) -> str:
    """An aligned table, then the settings that differ from their defaults with the source of each."""
    saved = "not saved" if run.checkpoint.save is None else f"saved to {run.checkpoint.save}"
    rows = {
        "model": describe_model(run),
        "parameters": _parameters(run, facts),
        "ranks": _ranks(run, facts),
        "pipeline": stages_report(run),
        "batch": _batch(run),
        "length": _length(run, facts),
        "optimizer": _optimizer(run),
        "precision": run.precision.params_dtype,
        "fp8": facts.fp8,
        "attention": facts.attention,
        **facts.mixers,
        "checkpoint": f"{saved}; loaded from {facts.loaded_from}" if facts.loaded_from else saved,
    }
    width = max(map(len, rows))
    lines = [f"== {facts.model_name}", *(f"   {name:<{width}}  {text}" for name, text in rows.items() if text)]
    lines += ["== settings that are not the defaults", *(f"   {line}" for line in settings_report(run))]
    if run.notes:
        lines += ["== notes", *(f"   {note}" for note in run.notes)]
    return "\n".join(lines)


def _parameters(run: RunConfig, facts: StartupFacts) -> str:
    which = "each rank" if run.parallel.pipeline_model_parallel_size == 1 else "ranks of the last pipeline stage"
    here = "" if facts.parameters_here == facts.parameters else f", {count(facts.parameters_here)} on {which}"
    frozen = f"; {count(facts.frozen)} frozen, {count(facts.parameters - facts.frozen)} trained" if facts.frozen else ""
    active = f", {count(facts.active)} for a token" if 0 < facts.active < facts.parameters else ""
    return f"{count(facts.parameters)}{active}{here}{frozen}"


def _ranks(run: RunConfig, facts: StartupFacts) -> str:
    sizes = {
        "tensor": run.parallel.tensor_model_parallel_size,
        "pipeline": run.parallel.pipeline_model_parallel_size,
        "context": run.parallel.context_parallel_size,
        "data": run.data_parallel_size,
        "workers": run.parallel.num_workers,
        "expert": run.parallel.expert_model_parallel_size,
    }
    if run.parallel.etp != run.parallel.tensor_model_parallel_size:
        sizes["expert tensor"] = run.parallel.etp
    layout = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    return f"{run.world_size} on {facts.device}" + (f": {layout}" if layout else "")


def _batch(run: RunConfig) -> str:
    training = run.training
    micro, replicas = training.micro_batch_size, run.replicas
    full = training.global_batch_size
    accumulated = full // (micro * replicas)
    each = run.sequences_per_sample
    sequences = f"{each} x " if each > 1 else ""
    tokens = f" of {sequences}{run.data.seq_length:,} tokens" if run.family.reads_tokens else ""
    ramp = f", {run.batch_ramp.size_at(0)} at first" if len(run.batch_ramp.sizes) > 1 else ""
    groups = f"{replicas} replica{plural_s(replicas)}"
    return f"{full} samples{tokens}{ramp}: {groups} x {micro} a microbatch x {accumulated} accumulated"


def _length(run: RunConfig, facts: StartupFacts) -> str:
    tokens = run.train_samples * run.tokens_per_sample
    flops = run.train_samples * facts.flops_per_sample
    but = f" without those of {', '.join(sorted(facts.uncounted))}" if facts.uncounted else ""
    start = f", from iteration {facts.start_iteration:,}" if facts.start_iteration else ""
    length = f"{run.train_iters:,} iterations{start}, {run.train_samples:,} samples"
    if not run.family.reads_tokens:
        return length
    theirs = megatron_lm_flops(run)
    also = "" if theirs is None else f" ({theirs * run.train_samples:.3g} by Megatron-LM's formula)"
    return f"{length}, {count(tokens)} tokens, {flops:.3g} model FLOPs{but}{also}"


def _optimizer(run: RunConfig) -> str:
    optimizer = run.optimizer
    rate = "no learning rate" if optimizer.lr is None else f"lr {optimizer.lr:g} {optimizer.lr_decay_style}"
    return (
        f"{optimizer.optimizer}, {rate} to {optimizer.min_lr:g}, weight decay {optimizer.weight_decay:g}, "
        f"clip {optimizer.clip_grad:g}"
    )
