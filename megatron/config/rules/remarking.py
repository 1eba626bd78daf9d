"""Remarks about valid settings that have no effect or an unexpected one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megatron.config.family import Rule
from megatron.config.flags import flag_of
from megatron.config.pipeline import schedule_name
from megatron.config.rules.positions import OF_YARN
from megatron.config.rules.profiling import needs_a_gpu
from megatron.config.rules.sentence import rule
from megatron.config.rules.sizes import LENGTHS, length_in
from megatron.config.run import RunConfig
from megatron.config.typed_spellings import typed_spelling
from megatron.config.update_rules import MATRIX_RULES

# fields, the reason why they have no effect, and whether they have one
NEEDS: tuple[tuple[str, str, Callable[[RunConfig], object]], ...] = (
    ("cp_comm_type", ", because --context-parallel-size is 1", lambda run: run.parallel.context_parallel_size > 1),
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
        "fp8_recipe fp8_wgrad first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 fp8_margin "
        "fp8_amax_history_len fp8_amax_compute_algo",
        " without --fp8-format",
        lambda run: run.fp8.is_on,
    ),
    (
        "fp8_margin fp8_amax_history_len fp8_amax_compute_algo",
        " without --fp8-recipe delayed",
        lambda run: run.fp8.fp8_recipe == "delayed",
    ),
    (
        "num_layers_at_start_in_bf16 num_layers_at_end_in_bf16",
        " without --first-last-layers-bf16",
        lambda run: run.fp8.first_last_layers_bf16,
    ),
    (
        "tensorboard_log_interval tensorboard_queue_size log_timers_to_tensorboard log_validation_ppl_to_tensorboard "
        "log_memory_to_tensorboard log_world_size_to_tensorboard",
        " without --tensorboard-dir",
        lambda run: run.reporting.tensorboard_dir,
    ),
    (
        "spike_window spike_threshold spike_limit",
        " without --spike-action",
        lambda run: run.guards.spike_action is not None,
    ),
    (
        "straggler_minmax_count straggler_threshold",
        " without --log-straggler",
        lambda run: run.guards.log_straggler,
    ),
    ("preflight_threshold", " without --preflight", lambda run: run.guards.preflight is not None),
    ("error_injection_type", " without --error-injection-rate", lambda run: run.guards.error_injection_rate),
    ("eval_tasks_interval", " without --eval-tasks", lambda run: run.reporting.eval_tasks),
    ("metrics_host", " without --metrics-port", lambda run: run.reporting.metrics_port),
    (
        "mlflow_run_name mlflow_tracking_uri",
        " without --mlflow-experiment",
        lambda run: run.reporting.mlflow_experiment is not None,
    ),
    ("wandb_entity wandb_exp_name wandb_save_dir", " without --wandb-project", lambda run: run.reporting.wandb_project),
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
    ("memory_snapshot_path", " without --record-memory-history", lambda run: run.profiling.record_memory_history),
    ("pytorch_profiler_collect_callstack", " without --use-pytorch-profiler", lambda run: run.profiling.with_torch),
    (
        "inference_max_seq_length inference_max_requests inference_dynamic_batching_buffer_size_gb "
        "inference_dynamic_batching_block_size inference_dynamic_batching_max_tokens disable_chunked_prefill "
        "inference_dynamic_batching_prefix_caching num_speculative_tokens draft_load",
        " on training",
        lambda run: False,
    ),
    (
        "recompute_modules",
        " without --recompute-granularity selective",
        lambda run: run.training.recompute_granularity == "selective",
    ),
    (
        "recompute_num_layers",
        " without --recompute-granularity full",
        lambda run: run.training.recompute_granularity == "full",
    ),
    (
        "kv_channels",
        " with --multi-latent-attention: heads are --qk-head-dim + --qk-pos-emb-head-dim wide",
        lambda run: not run.model.multi_latent_attention,
    ),
    (
        " ".join(sorted(OF_YARN - {"rotary_scaling_factor"})),
        " without a --rotary-scaling-factor",
        lambda run: run.model.position_embedding_type != "rope" or run.model.use_rope_scaling,
    ),
    ("mtp_loss_scaling_factor", " without --mtp-num-layers", lambda run: run.model.mtp_num_layers),
    (
        "optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d pin_cpu_grads pin_cpu_params",
        " without --optimizer-cpu-offload",
        lambda run: run.optimizer.optimizer_cpu_offload,
    ),
    (
        "outer_dp_sharding_strategy",
        " without --num-distributed-optimizer-instances",
        lambda run: run.parallel.num_distributed_optimizer_instances > 1,
    ),
    (
        "diloco_sync_interval diloco_outer_lr diloco_outer_momentum diloco_fragments diloco_overlap_steps "
        "diloco_mixing diloco_dtype",
        " without --diloco-workers",
        lambda run: run.parallel.diloco_workers is not None,
    ),
    (
        "muon_momentum muon_nesterov muon_num_ns_steps muon_coefficient_type muon_scale_mode muon_extra_scale_factor "
        "muon_tp_mode muon_fp32_matmul_prec",
        " without --optimizer muon",
        lambda run: run.optimizer.optimizer == "muon",
    ),
    (
        "muon_split_qkv muon_split_gate_up muon_scalar_optimizer",
        " without --optimizer muon, adafactor or soap",
        lambda run: run.optimizer.optimizer in MATRIX_RULES,
    ),
    ("lion_beta1 lion_beta2", " without --optimizer lion", lambda run: run.optimizer.scalar_rule == "lion"),
    (
        "ademamix_alpha ademamix_beta3 ademamix_warmup_iters",
        " without --optimizer ademamix",
        lambda run: run.optimizer.optimizer == "ademamix",
    ),
    (
        "adafactor_decay adafactor_clip_threshold adafactor_scale_parameter",
        " without --optimizer adafactor",
        lambda run: run.optimizer.optimizer == "adafactor",
    ),
    (
        "soap_shampoo_beta soap_precondition_frequency",
        " without --optimizer soap",
        lambda run: run.optimizer.optimizer == "soap",
    ),
    ("expert_tensor_parallel_size", " without --num-experts", lambda run: run.divides_over_expert_ranks),
    ("extra_vocab_size", " with --vocab-size", lambda run: run.tokenizer.vocab_size is None),
    (
        "make_vocab_size_divisible_by",
        " with --padded-vocab-size",
        lambda run: run.tokenizer.padded_vocab_size is None,
    ),
    ("min_offloaded_tensor_size", " without --cpu-offloading", lambda run: run.training.cpu_offloading),
    ("decoupled_min_lr", " without --decoupled-lr", lambda run: run.optimizer.decoupled_lr is not None),
    ("log_progress", " without --save, the folder of progress.txt", lambda run: run.checkpoint.save),
    ("load_hf_proof", " without --load-hf", lambda run: run.checkpoint.load_hf),
    ("save_interval", " without --save", lambda run: run.checkpoint.save),
    ("overwrite_run", " with --skip-train", lambda run: not run.training.skip_train),
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
    """Flags, as they were typed, and why they have no effect. What a loaded model's settings say is not among them."""
    specs = {spec.field: spec for spec in run.flags()}
    for fields, reason, has_effect in NEEDS:
        given = [specs[field] for field in fields.split() if run.given(field) and field not in run.inherited]
        named = [
            typed_spelling(run, spec) or spec.spelling
            for spec in given
            if not spec.is_switch or run.value(spec) != spec.default
        ]
        if named and not has_effect(run):
            yield named, reason


def lengths_in_the_other_unit(run: RunConfig) -> str | None:
    """Schedule lengths may be in iterations for a run counted in samples, and the other way round."""
    length = "--train-iters" if run.training.train_iters is not None else "--train-samples"
    ours, theirs = ("iters", "samples") if length == "--train-iters" else ("samples", "iters")
    flags = {name: flag_of(name) for name in LENGTHS if getattr(run.optimizer, f"{name}_{theirs}")}
    if not flags:
        return None
    given = ", ".join(f"{flag}-{theirs} {getattr(run.optimizer, f'{name}_{theirs}')}" for name, flag in flags.items())
    meant = ", ".join(f"{flag}-{ours} {length_in(run, ours, name)}" for name, flag in flags.items())
    return f"{given} with {length}: taken as {meant}, at {run.training.global_batch_size} samples an iteration"


def ramp_of_a_run_in_iterations(run: RunConfig) -> str | None:
    """With a changing batch size, iterations have different numbers of samples."""
    ramp = "--rampup-batch-size" if run.training.rampup_batch_size else "--step-batch-size-schedule"
    if len(run.batch_ramp.sizes) == 1 or run.training.train_iters is None:
        return None
    return (
        f"{ramp} with --train-iters {run.training.train_iters}: the run takes {run.train_samples} "
        "samples; lengths of the schedule in iterations count batches of --global-batch-size "
        f"{run.training.global_batch_size}"
    )


def decay_of_sgd(run: RunConfig) -> str | None:
    """Weight decay of sgd is another one than that of adam."""
    optimizer, decay = run.optimizer, run.optimizer.end_weight_decay
    if optimizer.optimizer != "sgd" or not decay or run.training.skip_train:
        return None
    return (
        f"--optimizer sgd: --weight-decay {decay:g} times the weight is added to its gradient (L2 regularization) and "
        "goes through the momentum, as in Megatron-LM; the other optimizers decouple it"
    )


def flat_end_of_the_learning_rate(run: RunConfig) -> str | None:
    """A decay that is shorter than the run leaves the learning rate at its lowest."""
    optimizer, length = run.optimizer, run.training.train_iters
    unit, total = ("samples", run.training.train_samples) if length is None else ("iters", length)
    decay = length_in(run, unit, "lr_decay")
    if run.training.skip_train or total is None or not 0 < decay < total or optimizer.lr_decay_style == "constant":
        return None
    if optimizer.lr is None or optimizer.min_lr == optimizer.lr:
        return None
    what = "iteration" if unit == "iters" else "sample"
    return (
        f"the learning rate is --min-lr {optimizer.min_lr:g} from {what} {decay} to {total}, as --lr-decay-{unit} is "
        f"shorter than the run; without it the decay takes the whole run"
    )


def mean_of_a_step(run: RunConfig) -> str | None:
    """Megatron-LM averages the means of microbatches, which differs where their token counts differ."""
    batch, micro = run.training.global_batch_size, run.training.micro_batch_size
    if not run.provenance or batch == micro or run.training.skip_train:
        return None
    if any(part.averages_answers for part in run.parts):
        return None
    if any("--calculate-per-token-loss" in note for note in run.notes):  # not a field: it asks for the only behaviour
        return None
    why = {
        "--eod-mask-loss": run.data.eod_mask_loss,
        "--sft": run.data.sft,
        f"--packing {run.data.packing}": run.data.packing != "stream",
    }
    named = [flag for flag, differs in why.items() if differs] + list(filter(None, [run.family.varying_counts]))
    if not named:
        return None
    return (
        "the loss of a step is the mean over all its tokens, as with Megatron-LM's --calculate-per-token-loss; "
        f"without that flag Megatron-LM averages the means of the {batch // micro} microbatches, which differs with "
        f"{' and '.join(named)}"
    )


RULES: tuple[Rule, ...] = (
    rule(
        "--sequence-parallel: off, because --tensor-model-parallel-size is 1",
        lambda run: run.given("sequence_parallel") and not run.parallel.sequence_parallel,
    ),
    decay_of_sgd,
    flat_end_of_the_learning_rate,
    lengths_in_the_other_unit,
    ramp_of_a_run_in_iterations,
    rule(
        "--save {run.checkpoint.save} without --save-interval: the only checkpoint is saved when the run ends",
        lambda run: (
            run.checkpoint.save is not None
            and run.checkpoint.save_interval is None
            and not (run.purpose.trains_in_epochs or run.training.skip_train)
        ),
    ),
    rule(
        "--split: {run.data.split!r} of --data-path for training, validation and test, because it is not given",
        lambda run: run.data.data_path and run.provenance and not run.given("split"),
    ),
    rule(  # the dynamic loss scale works by overflows
        "the check for losses that are not finite is off: with --fp16 and a dynamic loss scale they are skipped",
        lambda run: run.precision.fp16 and run.precision.loss_scale is None,
    ),
    rule(  # Megatron-LM approximates GELU only in the kernel that adds the bias
        "--disable-bias-linear: GELU is the tanh approximation; Megatron-LM's is exact then, as with --exact-gelu",
        lambda run: (
            run.given("add_bias_linear") and not run.model.add_bias_linear and run.model.activation == "gelu_tanh"
        ),
    ),
    mean_of_a_step,
    rule(
        "--recompute-modules layernorm: no effect on layers in FP8, which keep their inputs in 8 bits",
        lambda run: run.fp8.is_on and run.fp8.fp8_wgrad and "layernorm" in run.training.selected_modules,
    ),
    rule(
        "--profile: no iteration is profiled, because --profile-step-start is {run.profiling.profile_step_start} and "
        "the run ends at iteration {run.train_iters}",
        lambda run: (
            run.profiling.profile
            and not run.purpose.trains_in_epochs
            and run.profiling.profile_step_start >= run.train_iters
        ),
    ),
    lambda run: needs_a_gpu(run) if run.command.dry_run else None,  # which has no device
)
