"""What ``--dry-run`` prints: settings, layout, parameters and memory of a run, without data, ranks or devices."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.config.flags import plural_s
from megatron.config.pipeline import model_stages, num_stages
from megatron.config.report import count, describe_model, gigabytes, layout_report, settings_report, stages_report
from megatron.config.run import RunConfig
from megatron.config.vocabulary import vocabulary_size
from megatron.core.models.train_spec import TrainSpec
from megatron.core.tokenizers.build import built_size
from megatron.planning.adapters import check_adapters
from megatron.planning.communication import communication_report
from megatron.planning.estimate import (
    MemoryEstimate,
    active_parameters,
    frozen_parameters,
    memory_estimate,
    model_parameters,
    rank_parameters,
    stage_costs,
)
from megatron.planning.fitting import check_units, what_fits
from megatron.planning.mixers import mixer_lines
from megatron.planning.model import latents_sent
from megatron.planning.parameter_patterns import check_patterns, check_update_rule
from megatron.planning.schedule import schedule_facts
from megatron.planning.stages import with_stages

_LARGEST_GPU_GB = 288


def dry_run_report(run: RunConfig, train_spec: TrainSpec, *, files: Sequence[str] = ()) -> str:
    """Sections of text about a checked run. ``files``: lines about its files.

    Raises ConfigError when neither the settings nor the tokenizer's files give the size of the vocabulary, and for
    patterns of parameters that match nothing, or freeze everything; and for a unit of ZeRO 2 or 3 that no device holds.
    """
    run = with_stages(run.with_vocab_size(vocabulary_size(run, built_size)), train_spec)
    check_adapters(run, train_spec)
    check_patterns(run, train_spec)
    check_update_rule(run, train_spec)
    command = run.command
    device_bytes = 1e9 * (command.device_memory_gb or _LARGEST_GPU_GB)
    check_units(run, train_spec, device_bytes=device_bytes, ranks_per_node=command.ranks_per_node)
    memory = memory_estimate(run, train_spec)
    title = f"memory of {'one' if run.parallel.pipeline_model_parallel_size == 1 else 'the fullest'} rank, estimated"
    sections = {
        "settings that are not the defaults, and where they come from": settings_report(run),
        "notes": run.notes,
        "files": files,
        "model": [describe_model(run), *mixer_lines(run, train_spec)],
        "layout": layout_report(run, ranks_per_node=run.command.ranks_per_node),
        "batch and length": _batch(run),
        "parameters": _parameters(run, train_spec),
        "pipeline": _pipeline(run),
        "data parallelism": communication_report(run, train_spec),
        "context parallelism": latents_sent(run, train_spec),
        "experts": _experts(run, train_spec),
        title: [*_memory(memory, only_reads=run.purpose.only_reads), *_verdict(run, train_spec, memory)],
    }
    texts = ("\n   ".join([f"== {title}", *lines]) for title, lines in sections.items() if lines)
    return "\n\n".join(texts)


def _batch(run: RunConfig) -> list[str]:
    training = run.training
    micro, replicas, full = training.micro_batch_size, run.replicas, training.global_batch_size
    lines = [
        f"{full:,} samples a step: {replicas:,} data-parallel rank{plural_s(replicas)} x micro batch {micro} "
        f"x {full // (micro * replicas):,} accumulated{_tokens(run, full, before='; ')}"
    ]
    if training.rampup_batch_size:
        start, increment, samples = training.rampup_batch_size
        lines.append(f"from {start:,} samples a step, {increment:,} more at a time, over the first {samples:,} samples")
    lines += [
        f"{size:,} samples a step from sample {start:,} on{_tokens(run, start, before=' (', after=')')}"
        for start, size in run.batch_steps
    ]
    if training.skip_train:
        return lines
    if run.purpose.epochs is not None:
        lines.append(f"{run.purpose.epochs} epochs of --train-data, whose length in steps depends on the data")
    else:
        tokens = _tokens(run, run.train_samples, before=", ")
        lines.append(f"{run.train_iters:,} steps, {run.train_samples:,} samples{tokens}")
    return lines


def _tokens(run: RunConfig, samples: int, *, before: str, after: str = "") -> str:
    """The tokens of some samples between two marks; nothing for a family whose samples are no tokens."""
    return f"{before}{count(samples * run.tokens_per_sample)} tokens{after}" if run.family.reads_tokens else ""


def _parameters(run: RunConfig, train_spec: TrainSpec) -> list[str]:
    whole, ranks = model_parameters(run, train_spec), run.parallel.pipeline_model_parallel_size
    frozen, active = frozen_parameters(run, train_spec), active_parameters(run, train_spec)
    for_a_token = f", {active:,} for a token ({count(active)})" if active < whole else ""
    lines = [
        f"{whole:,} in the model ({count(whole)}){for_a_token}" + (f", {frozen:,} of them frozen" if frozen else "")
    ]
    for rank in range(ranks):
        here = rank_parameters(run, train_spec, pipeline_rank=rank)
        layers = sum(len(stage.layers) for stage in model_stages(run) if stage.rank == rank)
        parts = {
            "embeddings and output" if run.family.reads_tokens else "the module": here.ends,
            f"{layers:,} layers": here.layers,
            "the final norm": here.final_norm,
        }
        named = ", ".join(f"{number:,} in {part}" for part, number in parts.items() if number)
        lines.append(f"{here.total:,} on {'each rank' if ranks == 1 else f'pipeline rank {rank}'}: {named}")
    if not run.family.reads_tokens:
        return lines
    return [*lines, f"vocabulary of {run.model.vocab_size:,}, padded to {run.padded_vocab_size:,}"]


def _experts(run: RunConfig, train_spec: TrainSpec) -> list[str]:
    """What reaching experts on other ranks sends; nothing where all are on each rank."""
    sent = max(costs.exchanged for costs in stage_costs(run, train_spec))
    if not sent:
        return []
    return [
        f"a rank sends {gigabytes(sent)} to experts on others in the forward pass of a microbatch and as much in the "
        "backward pass, if choices are balanced; the busiest rank's time, kept activations and bytes grow with its load"
    ]


def _pipeline(run: RunConfig) -> list[str]:
    """Schedule, stages and waiting time; nothing without a pipeline."""
    if run.parallel.pipeline_model_parallel_size == 1:
        return []
    bubble = schedule_facts(run, [1.0] * num_stages(run)).bubble
    return [
        stages_report(run),
        f"ranks wait for {100 * bubble:.1f} % of the time they compute, if all stages take equally long",
    ]


def _memory(memory: MemoryEstimate, *, only_reads: bool) -> list[str]:
    parts = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "whole weights and gradients for a while": memory.whole,
        "copies of weights in FP8": memory.copies,
        "fp32 master weights": memory.main_params,
        "optimizer moments": memory.moments,
        "shared weights and outer momentum": memory.shared,
        "activations kept for the backward pass": memory.kept,
        "working memory, at most" if only_reads else "working memory of loss and backward pass": memory.working,
        "together": memory.total,
    }
    width = max(len(name) for name, size in parts.items() if size)
    lines = [f"{name:<{width}}  {gigabytes(size):>10}" for name, size in parts.items() if size]
    if memory.offloaded:
        lines.append(f"and {gigabytes(memory.offloaded)} of optimizer state in main memory")
    if memory.activations_offloaded:
        lines.append(f"and {gigabytes(memory.activations_offloaded)} of activations in main memory")
    if memory.uncounted:
        lines.append(f"without activations of {', '.join(sorted(memory.uncounted))}: no method costs() of their own")
    return lines


def _verdict(run: RunConfig, train_spec: TrainSpec, memory: MemoryEstimate) -> list[str]:
    """Whether the run fits into ``--device-memory-gb``, and what would."""
    gb = run.command.device_memory_gb
    if gb is None:
        said = f"more than any GPU has ({_LARGEST_GPU_GB} GB); give --device-memory-gb to see what would fit"
        return [said] if memory.total > _LARGEST_GPU_GB * 1e9 else []
    if memory.total <= gb * 1e9:
        return [f"fits into {gb:g} GB, with {gigabytes(gb * 1e9 - memory.total)} to spare for libraries and fragments"]
    per_node = run.command.ranks_per_node
    fits = what_fits(run, train_spec, device_bytes=gb * 1e9, ranks_per_node=per_node)
    if not fits:
        return [f"does not fit into {gb:g} GB, and no change of layout, recomputation or micro batch makes it fit"]
    return [f"does not fit into {gb:g} GB; these would:", *(f"  {fit.flags}  ({gigabytes(fit.total)})" for fit in fits)]
