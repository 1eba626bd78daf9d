"""Rules about profiles."""

from __future__ import annotations

from megatron.config.run import RunConfig


def profiled_iterations_exist(run: RunConfig) -> str | None:
    """At least one iteration is profiled."""
    start, end = run.profiling.profile_step_start, run.profiling.profile_step_end
    if not run.profiling.profile or start < end:
        return None
    return f"--profile-step-start {start} is not before --profile-step-end {end}: no iteration would be profiled"


def profiled_ranks_exist(run: RunConfig) -> str | None:
    """--profile-ranks are ranks of the run."""
    profiling, last = run.profiling, run.world_size - 1
    wrong = [rank for rank in profiling.profile_ranks if rank > last]
    if not wrong or not (profiling.profile or profiling.record_memory_history):
        return None
    return f"--profile-ranks {' '.join(map(str, wrong))}: the run has ranks 0 to {last}"


def trace_has_a_folder(run: RunConfig) -> str | None:
    """Traces of torch's profiler need --tensorboard-dir."""
    if not run.profiling.with_torch or run.reporting.tensorboard_dir:
        return None
    return "--use-pytorch-profiler writes its traces into --tensorboard-dir, which is not given"


def needs_a_gpu(run: RunConfig) -> str | None:
    """Profiling flags that need a GPU."""
    asked = run.profiling
    needs = {
        "--profile": (asked.profile and not asked.use_pytorch_profiler, "add --use-pytorch-profiler"),
        "--record-memory-history": (asked.record_memory_history, "leave it out"),
        "--nvtx-ranges": (asked.nvtx_ranges, "leave it out"),
    }
    said = [f"{flag} needs a GPU; on a CPU {advice}" for flag, (given, advice) in needs.items() if given]
    return "; ".join(said) or None


def gloo_profiles_a_cpu(run: RunConfig) -> str | None:
    """gloo means a run on CPUs, which have nothing to record for some profiling flags."""
    return needs_a_gpu(run) if run.parallel.distributed_backend == "gloo" else None


RULES = (gloo_profiles_a_cpu, profiled_iterations_exist, profiled_ranks_exist, trace_has_a_folder)
