"""Settings that have an effect only together with another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megatron.config.pipeline import schedule_name
from megatron.config.run import RunConfig
from megatron.config.typed_spellings import typed_spelling

# fields, the reason why they have no effect, and whether they have one
NEEDS: tuple[tuple[str, str, Callable[[RunConfig], object]], ...] = (
    (
        "cp_comm_type",
        ", because --context-parallel-size is 1",
        lambda run: run.parallel.context_parallel_size > 1,
    ),
    (
        "overlap_p2p_communication account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split",
        ", because --pipeline-model-parallel-size is 1",
        lambda run: run.parallel.pipeline_model_parallel_size > 1,
    ),
    (
        "microbatch_group_size_per_virtual_pipeline_stage",
        " without virtual stages",
        lambda run: schedule_name(run) == "interleaved",
    ),
    (
        "loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis",
        " without --fp16",
        lambda run: run.precision.fp16,
    ),
    (
        "tensorboard_log_interval tensorboard_queue_size log_timers_to_tensorboard log_validation_ppl_to_tensorboard "
        "log_memory_to_tensorboard log_world_size_to_tensorboard",
        " without --tensorboard-dir",
        lambda run: run.reporting.tensorboard_dir,
    ),
    (
        "wandb_entity wandb_exp_name wandb_save_dir",
        " without --wandb-project",
        lambda run: run.reporting.wandb_project,
    ),
    (
        "profile_step_start profile_step_end use_pytorch_profiler pytorch_profiler_collect_shapes",
        " without --profile",
        lambda run: run.profiling.profile,
    ),
    (
        "profile_ranks",
        " without --profile or --record-memory-history",
        lambda run: run.profiling.profile or run.profiling.record_memory_history,
    ),
    (
        "memory_snapshot_path",
        " without --record-memory-history",
        lambda run: run.profiling.record_memory_history,
    ),
    (
        "pytorch_profiler_collect_callstack",
        " without --use-pytorch-profiler",
        lambda run: run.profiling.with_torch,
    ),
    ("inference_max_seq_length inference_max_requests", " on training", lambda run: False),
    (
        "recompute_num_layers",
        " without --recompute-granularity full",
        lambda run: run.training.recompute_granularity == "full",
    ),
    ("decoupled_min_lr", " without --decoupled-lr", lambda run: run.optimizer.decoupled_lr is not None),
    ("log_progress", " without --save, the folder of progress.txt", lambda run: run.checkpoint.save),
    ("save_interval", " without --save", lambda run: run.checkpoint.save),
    ("manual_gc_interval", " without --manual-gc", lambda run: run.training.manual_gc),
    (
        "reset_position_ids",
        " with --position-embedding-type none",
        lambda run: run.model.position_embedding_type != "none",
    ),
    (
        "fim_spm_rate fim_prefix_token fim_middle_token fim_suffix_token",
        " without --fim-rate",
        lambda run: run.data.fim_rate,
    ),
)


def without_effect(run: RunConfig) -> Iterator[tuple[list[str], str]]:
    """Flags, as they were typed, and why they have no effect."""
    specs = {spec.field: spec for spec in run.flags()}
    for fields, reason, has_effect in NEEDS:
        given = [specs[field] for field in fields.split() if run.given(field)]
        named = [
            typed_spelling(run, spec) or spec.spelling
            for spec in given
            if not spec.is_switch or run.value(spec) != spec.default
        ]
        if named and not has_effect(run):
            yield named, reason
