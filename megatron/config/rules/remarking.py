"""Remarks about settings that are sound but have no effect, or another one than it seems."""

from __future__ import annotations

from megatron.config.bert import BertConfig
from megatron.config.pipeline import schedule_name
from megatron.config.rules.sizes import LENGTHS, length_in
from megatron.config.run import RunConfig
from megatron.config.task import TaskConfig


def sequence_parallel_needs_tensor_ranks(run: RunConfig) -> str | None:
    """Sequence parallelism splits over tensor-parallel ranks."""
    if run.given("sequence_parallel") and not run.parallel.sequence_parallel:
        return "--sequence-parallel: off, because --tensor-model-parallel-size is 1"
    return None


def exchange_needs_context_ranks(run: RunConfig) -> str | None:
    """Keys are exchanged where ranks hold different ones."""
    if run.given("cp_comm_type") and run.parallel.context_parallel_size == 1:
        kinds = " ".join(run.parallel.cp_comm_type)
        return f"--cp-comm-type {kinds}: no effect, because --context-parallel-size is 1"
    return None


def messages_need_a_pipeline(run: RunConfig) -> str | None:
    """Only pipeline ranks send each other messages."""
    if run.given("overlap_p2p_communication") and run.parallel.pipeline_model_parallel_size == 1:
        return "--no-overlap-p2p-communication: no effect, because --pipeline-model-parallel-size is 1"
    return None


def loss_scale_needs_fp16(run: RunConfig) -> str | None:
    """Only fp16 has a loss scale."""
    if run.precision.fp16:
        return None
    fields = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
    named = [f"--{field.replace('_', '-')}" for field in fields if run.given(field)]
    return f"{', '.join(named)}: no effect without --fp16" if named else None


def tensorboard_needs_a_folder(run: RunConfig) -> str | None:
    """Points are written only where there is a folder."""
    if run.reporting.tensorboard_dir:
        return None
    fields = (
        "tensorboard_log_interval",
        "tensorboard_queue_size",
        "log_timers_to_tensorboard",
        "log_validation_ppl_to_tensorboard",
        "log_memory_to_tensorboard",
        "log_world_size_to_tensorboard",
    )
    named = [f"--{field.replace('_', '-')}" for field in fields if run.given(field)]
    return f"{', '.join(named)}: no effect without --tensorboard-dir" if named else None


def profiling_must_be_asked_for(run: RunConfig) -> str | None:
    """Which iterations and ranks matters only where something is profiled."""
    profiling = run.profiling
    needs = {
        "--profile": ("profile_step_start", "profile_step_end", "use_pytorch_profiler"),
        "--profile or --record-memory-history": ("profile_ranks",),
        "--record-memory-history": ("memory_snapshot_path",),
        "--profile --use-pytorch-profiler": ("pytorch_profiler_collect_callstack",),
    }
    wanted = (
        profiling.profile,
        profiling.profile or profiling.record_memory_history,
        profiling.record_memory_history,
        profiling.with_torch,
    )
    said = [
        f"{', '.join(named)}: no effect without {need}"
        for (need, fields), is_wanted in zip(needs.items(), wanted)
        if not is_wanted and (named := [f"--{field.replace('_', '-')}" for field in fields if run.given(field)])
    ]
    return "; ".join(said) or None


def wandb_needs_a_project(run: RunConfig) -> str | None:
    """Nothing is sent without a project."""
    if run.reporting.wandb_project:
        return None
    named = [
        f"--wandb-{field}"
        for field in ("entity", "exp-name", "save-dir")
        if run.given(f"wandb_{field}".replace("-", "_"))
    ]
    return f"{', '.join(named)}: no effect without --wandb-project" if named else None


def limits_of_generation(run: RunConfig) -> str | None:
    """Training does not generate."""
    named = [
        f"--{field.replace('_', '-')}"
        for field in ("inference_max_seq_length", "inference_max_requests")
        if run.given(field)
    ]
    return f"{', '.join(named)}: no effect on training" if named else None


def lengths_in_the_other_unit(run: RunConfig) -> str | None:
    """A run counted in samples may have its schedule in iterations, and the other way round."""
    length = "--train-iters" if run.training.train_iters is not None else "--train-samples"
    ours, theirs = ("iters", "samples") if length == "--train-iters" else ("samples", "iters")
    flags = {name: f"--{name.replace('_', '-')}" for name in LENGTHS if getattr(run.optimizer, f"{name}_{theirs}")}
    if not flags:
        return None
    given = ", ".join(f"{flag}-{theirs} {getattr(run.optimizer, f'{name}_{theirs}')}" for name, flag in flags.items())
    meant = ", ".join(f"{flag}-{ours} {length_in(run, ours, name)}" for name, flag in flags.items())
    return f"{given} with {length}: taken as {meant}, at {run.training.global_batch_size} samples an iteration"


def ramp_of_a_run_in_iterations(run: RunConfig) -> str | None:
    """Iterations of a changing batch are not equally long, so the number of samples is no product."""
    ramp = "--rampup-batch-size" if run.training.rampup_batch_size else "--step-batch-size-schedule"
    if len(run.batch_ramp.sizes) == 1 or run.training.train_iters is None:
        return None
    return (
        f"{ramp} with --train-iters {run.training.train_iters}: the run takes {run.train_samples} "
        "samples; lengths of the schedule in iterations count batches of --global-batch-size "
        f"{run.training.global_batch_size}"
    )


def recomputed_layers_need_full(run: RunConfig) -> str | None:
    """A number of layers belongs to the recomputation of whole layers."""
    layers = run.training.recompute_num_layers
    if layers is None or run.training.recompute_granularity == "full":
        return None
    return f"--recompute-num-layers {layers}: no effect without --recompute-granularity full"


def accounting_needs_a_pipeline(run: RunConfig) -> str | None:
    """Embedding and loss count as layers where layers are divided over stages."""
    sizes = run.parallel
    flags = {
        "--account-for-embedding-in-pipeline-split": sizes.account_for_embedding_in_pipeline_split,
        "--account-for-loss-in-pipeline-split": sizes.account_for_loss_in_pipeline_split,
    }
    named = [flag for flag, value in flags.items() if value]
    if not named or sizes.pipeline_model_parallel_size > 1:
        return None
    return f"{', '.join(named)}: no effect, because --pipeline-model-parallel-size is 1"


def saving_without_an_interval(run: RunConfig) -> str | None:
    """A folder alone asks for one checkpoint."""
    checkpoint = run.checkpoint
    if checkpoint.save is None or checkpoint.save_interval is not None or run.recipe.trains_in_epochs:
        return None
    if run.training.skip_train:
        return None
    return f"--save {checkpoint.save} without --save-interval: the only checkpoint is saved when the run ends"


def progress_needs_a_folder(run: RunConfig) -> str | None:
    """Progress lines are written beside checkpoints."""
    if run.reporting.log_progress and run.checkpoint.save is None:
        return "--log-progress: no effect without --save, the folder of progress.txt"
    return None


def save_interval_needs_a_folder(run: RunConfig) -> str | None:
    """Checkpoints are written only where there is a folder."""
    if run.given("save_interval") and run.checkpoint.save is None:
        return f"--save-interval {run.checkpoint.save_interval}: no effect without --save"
    return None


def collection_interval_needs_manual_collection(run: RunConfig) -> str | None:
    """Python collects on its own unless told otherwise."""
    if run.training.manual_gc_interval and not run.training.manual_gc:
        return f"--manual-gc-interval {run.training.manual_gc_interval}: no effect without --manual-gc"
    return None


def default_split(run: RunConfig) -> str | None:
    """One data set is cut by shares that were not asked for."""
    if run.data.data_path and run.provenance and not run.given("split"):
        return f"--split: {run.data.split!r} of --data-path for training, validation and test, because it is not given"
    return None


def nan_check_is_off(run: RunConfig) -> str | None:
    """Overflows are how the dynamic loss scale of fp16 finds its way."""
    if run.precision.fp16 and run.precision.loss_scale is None:
        return "the check for losses that are not finite is off: with --fp16 and a dynamic loss scale they are skipped"
    return None


def positions_need_to_enter(run: RunConfig) -> str | None:
    """Positions that start anew matter only where positions enter."""
    if run.given("reset_position_ids") and run.model.position_embedding_type == "none":
        return "--reset-position-ids: no effect with --position-embedding-type none"
    return None


def fill_in_settings_need_a_rate(run: RunConfig) -> str | None:
    """How documents are rearranged matters only where some are."""
    named = run.data.given_fill_in_flags()
    return f"{', '.join(named)}: no effect without --fim-rate" if named and not run.data.fim_rate else None


def microbatch_groups_need_virtual_stages(run: RunConfig) -> str | None:
    """Microbatches take turns between chunks only where a rank has several."""
    size = run.parallel.microbatch_group_size_per_virtual_pipeline_stage
    if size is None or schedule_name(run) == "interleaved":
        return None
    return f"--microbatch-group-size-per-virtual-pipeline-stage {size}: no effect without virtual stages"


def epochs_set_the_pace(run: RunConfig) -> str | None:
    """A fine-tuning is evaluated after each epoch, on all data, and drops no sample."""
    task = run.find(TaskConfig)
    if task is None or task.answers is None:
        return None
    fields = ("eval_interval", "eval_iters")
    named = [f"--{field.replace('_', '-')}" for field in fields if run.given(field)] + ["--keep-last"] * task.keep_last
    if not named:
        return None
    return (
        f"{', '.join(named)}: no effect with --task {task.task}: each epoch ends with scores of all --valid-data, and "
        "no sample is dropped"
    )


def gelu_without_biases(run: RunConfig) -> str | None:
    """Megatron-LM approximates GELU only in the kernel that adds the bias."""
    if not run.given("add_bias_linear") or run.model.add_bias_linear or run.model.activation != "gelu_tanh":
        return None
    return "--disable-bias-linear: GELU is the tanh approximation; Megatron-LM's is exact then, as with --exact-gelu"


def gelu_of_the_word_head(run: RunConfig) -> str | None:
    """A BERT of Megatron-LM has the exact GELU in its head for hidden words, whatever its layers have."""
    bert = run.find(BertConfig)
    if bert is None or bert.exact_gelu_head or run.model.exact_gelu or run.given("exact_gelu_head"):
        return None
    if not run.provenance or run.training.skip_train:
        return None
    return (
        "GELU in the head for hidden words is the tanh approximation; Megatron-LM's is exact, as with --exact-gelu-head"
    )


def mean_of_a_step(run: RunConfig) -> str | None:
    """Megatron-LM takes the mean of its microbatches' means, which is another one where their counts differ."""
    batch, micro = run.training.global_batch_size, run.training.micro_batch_size
    if not run.provenance or batch == micro or run.training.skip_train or not run.outline.predicts_words:
        return None
    why = {
        "--eod-mask-loss": run.data.eod_mask_loss,
        "--sft": run.data.sft,
        f"--packing {run.data.packing}": run.data.packing != "stream",
        "hidden words": run.outline.has_padding,
    }
    named = [flag for flag, differs in why.items() if differs]
    if not named:
        return None
    return (
        "the loss of a step is the mean over all its tokens, as with Megatron-LM's --calculate-per-token-loss; "
        f"without that flag Megatron-LM averages the means of the {batch // micro} microbatches, which differs with "
        f"{' and '.join(named)}"
    )


RULES = (
    sequence_parallel_needs_tensor_ranks,
    exchange_needs_context_ranks,
    messages_need_a_pipeline,
    loss_scale_needs_fp16,
    tensorboard_needs_a_folder,
    profiling_must_be_asked_for,
    wandb_needs_a_project,
    limits_of_generation,
    lengths_in_the_other_unit,
    ramp_of_a_run_in_iterations,
    recomputed_layers_need_full,
    accounting_needs_a_pipeline,
    saving_without_an_interval,
    progress_needs_a_folder,
    save_interval_needs_a_folder,
    collection_interval_needs_manual_collection,
    default_split,
    nan_check_is_off,
    positions_need_to_enter,
    fill_in_settings_need_a_rate,
    microbatch_groups_need_virtual_stages,
    epochs_set_the_pace,
    gelu_without_biases,
    gelu_of_the_word_head,
    mean_of_a_step,
)
