"""Rules about profiles."""

from __future__ import annotations

from megatron.config.family import Rule
from megatron.config.rules.sentence import rule
from megatron.config.run import RunConfig


def profiled_ranks_exist(run: RunConfig) -> str | None:
    """--profile-ranks are ranks of the run."""
    profiling, last = run.profiling, run.world_size - 1
    wrong = [rank for rank in profiling.profile_ranks if rank > last]
    if not wrong or not (profiling.profile or profiling.record_memory_history):
        return None
    return f"--profile-ranks {' '.join(map(str, wrong))}: the run has ranks 0 to {last}"


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


RULES: tuple[Rule, ...] = (
    lambda run: needs_a_gpu(run) if run.parallel.distributed_backend == "gloo" else None,  # which is for CPUs
    rule(
        "--profile-step-start {run.profiling.profile_step_start} is not before --profile-step-end "
        "{run.profiling.profile_step_end}: no iteration would be profiled",
        lambda run: run.profiling.profile and run.profiling.profile_step_start >= run.profiling.profile_step_end,
    ),
    profiled_ranks_exist,
    rule(
        "--use-pytorch-profiler writes its traces into --tensorboard-dir, which is not given",
        lambda run: run.profiling.with_torch and not run.reporting.tensorboard_dir,
    ),
)
