"""One rule per setting that is accepted by name but not built yet; delete the rule when the feature lands."""

from __future__ import annotations

from megatron.config.run import RunConfig


def pipeline(run: RunConfig) -> str | None:
    """Pipeline stages."""
    stages = run.parallel.pipeline_model_parallel_size
    if stages == 1:
        return None
    return (
        f"--pipeline-model-parallel-size {stages} is not available yet; use --tensor-model-parallel-size, "
        "--use-distributed-optimizer and data parallelism"
    )


def interleaved_pipeline(run: RunConfig) -> str | None:
    """Interleaved pipeline stages."""
    parallel = run.parallel
    for flag, size in (
        ("--num-layers-per-virtual-pipeline-stage", parallel.num_layers_per_virtual_pipeline_stage),
        ("--num-virtual-stages-per-pipeline-rank", parallel.num_virtual_stages_per_pipeline_rank),
    ):
        if size is not None:
            return f"{flag} {size} is not available yet; leave it out"
    return None


def async_save(run: RunConfig) -> str | None:
    """Checkpoints written while training goes on."""
    if not run.checkpoint.async_save:
        return None
    return "--async-save is not available yet; leave it out: checkpoints are written before training goes on"


RULES = (pipeline, interleaved_pipeline, async_save)
