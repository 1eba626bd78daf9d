"""Megatron-LM's saved arguments, sorted by whether they change what a model computes.

The tables know the arguments of releases up to core 0.16 and of the main branch after it. Several hundred arguments are
saved, and those that change the function without adding a tensor leave no other trace in a checkpoint. So an argument
has to be known: one that is in no table, and has a value that isn't empty, zero or off, is refused by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from megatron.config.model import ModelConfig
from megatron.errors import CheckpointError, enumeration

FLAG = "--ignore-saved-args"

READ = """
num_layers encoder_num_layers decoder_num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels
group_query_attention num_query_groups max_position_embeddings position_embedding_type add_position_embedding
relative_attention_num_buckets relative_attention_max_distance use_rotary_position_embeddings rotary_percent
rotary_base rotary_interleaved rotary_seq_len_interpolation_factor use_rope_scaling rope_scaling_factor
norm_epsilon layernorm_epsilon apply_layernorm_1p layernorm_zero_centered_gamma
apply_residual_connection_post_layernorm add_bias_linear add_qkv_bias swiglu quick_geglu squared_relu bias_gelu_fusion
openai_gelu qk_layernorm untie_embeddings_and_output_weights bert_binary_head attention_dropout hidden_dropout
window_size window_attn_skip_freq softmax_type softmax_scale qk_l2_norm no_rope_freq
attention_output_gate
yarn_rotary_scaling_factor yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow yarn_mscale
yarn_mscale_all_dim yarn_correction_range_round_to_int
num_experts moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_gate
moe_router_topk moe_router_pre_softmax moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk
moe_router_enable_expert_bias moe_expert_capacity_factor expert_model_parallel_size expert_tensor_parallel_size
multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim
rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim
mtp_num_layers
hybrid_layer_pattern hybrid_override_pattern hybrid_attention_ratio hybrid_mlp_ratio is_hybrid_model
mtp_hybrid_override_pattern
mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads
linear_attention_freq linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads
linear_num_value_heads
"""
"""Arguments that a conversion reads."""

_SPECS = "megatron.core.models.gpt.gpt_layer_specs"
_MAMBA_SPEC = "megatron.core.models.mamba.mamba_layer_specs"
_HYBRID_SPEC = "megatron.core.models.hybrid.hybrid_layer_specs"
_UNEQUAL = "layers of different kinds"
_SEVERAL = "moe_router_load_balancing_type"  # may be a list
OF_QUICK_GEGLU = ("activation_func_clamp_value", "glu_linear_offset")
"""Arguments whose meaning with other activations differs from release to release."""

DELTA_NETS = ("gated_delta_net", "gdn")
"""Names of the gated delta net, the second since 2026."""

LIMITED: dict[str, tuple[str, tuple[object, ...]]] = {
    "activation_func_clamp_value": ("a clamped MLP not gated by quick GELU", ()),
    "enable_hyper_connections": ("hyper-connections", ()),
    "experimental_attention_variant": ("an experimental kind of attention", DELTA_NETS),
    "gdn_output_gate_type": ("another gate of gated delta nets", ("silu", "swish")),
    "glu_linear_offset": ("an offset in an MLP not gated by quick GELU", ()),
    "head_wise_attn_gate": ("gates on the output of attention", ()),
    "heterogeneous_block_specs": (_UNEQUAL, ()),
    "heterogeneous_layers_config_encoded_json": (_UNEQUAL, ()),
    "heterogeneous_layers_config_path": (_UNEQUAL, ()),
    "linear_attention_type": ("linear attention", DELTA_NETS),
    "moe_apply_probs_on_input": ("weights of experts that multiply their input", ()),
    "moe_extended_tp": ("experts split over tensor- and expert-parallel ranks together", ()),
    "moe_latent_size": ("experts that work in a width of their own", ()),
    "moe_mlp_glu_interleave_size": ("gates and values of experts in turns", ()),
    "moe_router_dtype": ("another type of routers", ("fp32", "fp64")),
    "moe_router_force_biased": ("routers that choose at random", ()),
    "moe_router_force_load_balancing": ("routers that choose at random", ()),
    "moe_router_load_balancing_type": (
        "another way of balancing experts",
        ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"),
    ),
    "moe_router_score_function": ("another score of experts", ("softmax", "sigmoid", "sqrtsoftplus")),
    "moe_router_topk_limited_devices": ("experts on a limited number of devices", ()),
    "mtp_spec": ("layers that a specification builds", ([_MAMBA_SPEC, "mamba_stack_spec"],)),
    "mtp_use_repeated_layer": ("one layer for all depths of multi-token prediction", ()),
    "normalization": ("another kind of norm", ("LayerNorm", "RMSNorm")),
    "onnx_safe": ("a GELU for export to ONNX", ()),
    "retro_add_retriever": ("RETRO's retriever", ()),
    "rope_type": ("another kind of rotary positions", ("rope",)),
    "rotary_base_per_layer": ("a rotary base for each layer", ()),
    "spec": (
        "layers that a specification builds",
        (
            ["local"],
            [_SPECS, "get_gpt_layer_local_spec"],
            [_SPECS, "get_gpt_layer_with_transformer_engine_spec"],
            [_MAMBA_SPEC, "mamba_stack_spec"],
            [_HYBRID_SPEC, "hybrid_stack_spec"],
        ),
    ),
    "use_mup": ("MuP's multipliers", ()),
    "vision_pretraining": ("images", ()),
    "yaml_cfg": ("settings in a YAML file", ()),
}
"""Arguments that change what a model computes: what a model has under them, and the values under which it has not.

None, False, zero and what is empty are always among these values.
"""

WITH_LIMITED = """
actual_vocab_size apply_dsa_kernel_fusion cache_mla_latents csa_* dsa_* gdn_gdr_backend hca_*
linear_cp_mode mamba_inference_* mamba_training_* mhc_* mok_* mrope_section mup_* num_residual_streams retro_*
use_fused_mhc use_mamba_mem_eff_path disable_mamba_mem_eff_path use_mok_megakernel
"""
"""Arguments that only have an effect with one of ``LIMITED``, or with positions that are refused. ``*``: any ending."""

WITHOUT_EFFECT = f"""
iteration curr_iteration consumed_* skipped_train_samples num_floating_point_operations_so_far model_type do_train
do_valid do_test rank world_size local_rank

seed micro_batch_size batch_size global_batch_size rampup_batch_size step_batch_size_schedule
decrease_batch_size_if_needed train_* eval_* start_eval_at_iter skip_train test_mode full_validation
multiple_validation_sets validation_* exit_* iterations_to_skip result_rejected_tracker_filename error_injection_*
rerun_mode check_* manual_gc* empty_unused_memory_level recompute_* checkpoint_activations activations_checkpoint_*
distribute_* profile* use_pytorch_profiler pytorch_profiler_* record_* memory_snapshot_path nvtx_ranges
gpu_sniff_test_interval deterministic_mode batch_invariant_mode qk_clip* sft sft_* perform_rl_step rl_* grpo_*
langrl_*

optimizer optimizer_* lr lr_* min_lr warmup adam_* sgd_* muon_* lion_* soap_* weight_decay* start_weight_decay
end_weight_decay no_weight_decay_cond_type apply_wd_* decoupled_* head_lr_mult clip_grad loss_scale*
initial_loss_scale min_loss_scale hysteresis override_opt_param_scheduler use_checkpoint_opt_param_scheduler
override_lr_scheduler use_checkpoint_lr_scheduler use_precision_aware_optimizer main_grads_dtype main_params_dtype
exp_avg_* use_torch_optimizer_for_cpu_offload pin_cpu_* dump_param_to_param_group_map grad_reduce_in_bf16
accumulate_allreduce_grads_in_fp32 calculate_per_token_loss reuse_grad_buf_for_mxfp8_param_ag fp16_lm_cross_entropy
cross_entropy_* init_method_std init_method_xavier_uniform embedding_init_method* perform_initialization
use_cpu_initialization

data_* split valid_data_path test_data_path mock_data per_split_data_args_path seq_length encoder_seq_length
decoder_seq_length sample_rate mask_prob short_seq_prob num_workers dataloader_type reset_position_ids
reset_attention_mask eod_mask_loss create_attention_mask_in_dataloader num_dataset_builder_threads mmap_*
s3_cache_path object_storage_cache_path mid_level_dataset_surplus allow_ambiguous_pad_tokens fim_*
variable_seq_lengths max_seqlen_per_dp_cp_rank thd_* dataset_* tokenizer_* vocab_* padded_vocab_size
make_vocab_size_divisible_by merge_file tiktoken_* legacy_tokenizer trust_remote_code

tensor_model_parallel_size pipeline_model_parallel_* model_parallel_size encoder_tensor_model_parallel_size
encoder_pipeline_model_parallel_size transformer_pipeline_model_parallel_size virtual_pipeline_model_parallel_size
num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank microbatch_group_size_per_*
decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers num_layers_in_* account_for_*
standalone_embedding_stage sequence_parallel context_parallel_size hierarchical_context_parallel_sizes
hybrid_context_parallel cp_* distributed_* nccl_* ddp_* DDP_impl use_contiguous_buffers_in_local_ddp fsdp_*
torch_fsdp2_* megatron_fsdp_* use_torch_fsdp2 use_custom_fsdp use_megatron_fsdp outer_dp_* init_model_with_meta_device
suggested_communication_unit_size keep_fp8_* enable_full_sharding_in_hsdp use_distributed_optimizer
num_distributed_optimizer_instances use_ring_exchange_p2p use_tp_pp_dp_mapping use_sharp sharp_enabled_group
enable_gloo_process_groups use_gloo_process_groups disable_symmetric_registration symmetric_ar_type overlap_* align_*
delay_* defer_embedding_wgrad_compute wgrad_deferral_limit gradient_* scatter_gather_tensors_in_pipeline tp_comm_*
tp_only_amax_red batch_p2p_* deallocate_pipeline_outputs high_priority_* ep_overlap_* lazy_mpu_init replication*
use_nccl_ub cpu_offloading* fine_grained_activation_offloading offload_modules min_offloaded_tensor_size

fp16 bf16 fp8* fp4* params_dtype pipeline_dtype enable_autocast autocast_dtype fp32_residual_connection
attention_softmax_in_fp32 apply_query_key_layer_scaling disable_bf16_reduced_precision_matmul first_last_layers_bf16
num_layers_at_* use_kitchen use_kitchen_attention kitchen_* transformer_impl attention_backend use_flash_attn
masked_softmax_fusion bias_swiglu_fusion bias_dropout_fusion bias_activation_fusion apply_rope_fusion fused_*
use_fused_weighted_squared_relu use_transformer_engine_op_fuser dense_grouped_gemm use_grouped_gemm_*
persist_layer_norm no_persist_layer_norm memory_efficient_layer_norm clone_scatter_output_in_embedding
use_te_activation_func use_te_rng_tracker te_rng_tracker disable_jit_fuser disable_parameter_transpose_cache
cuda_graph_* enable_cuda_graph external_cuda_graph use_mcore_models deprecated_use_mcore_models use_legacy_*
mla_down_proj_fusion

save save_* load load_* no_save_* no_load_* finetune non_persistent_* pretrained_checkpoint ckpt_* use_dist_ckpt*
dist_ckpt_* distrib_optim_* use_persistent_ckpt_worker use_checkpoint_args use_mp_args_from_checkpoint_args
use_tokenizer_model_from_checkpoint_args auto_detect_ckpt_format strict_fsdp_dtensor_load async_*
hetereogenous_dist_checkpoint most_recent_k verify_integrity

log_* logging_level timing_log_* barrier_with_L1_time tensorboard_* wandb_* mlflow_* comet_* enable_one_logger
one_logger_* app_tag_* config_logger_dir straggler_* disable_straggler_on_startup run_workload_inspector_server
use_workload_inspector_server throughput_window_size runtime_time_unit filter_warnings modules_to_filter
set_level_for_all_loggers flight_recorder_* enable_ft_package calc_ft_timeouts ft_* inprocess_* adlr_* enable_msc
memory_keys enable_experimental enable_megatron_core_experimental

inference_* flash_decode max_tokens_to_oom mlp_chunks_for_prefill decode_only_cuda_graphs disable_chunked_prefill
use_inference_optimized_layers output_bert_embeddings bert_embedder_type biencoder_* ict_* bert_load titles_data_path
query_in_block_prob use_one_sent_docs evidence_data_path retriever_* block_data_path embedding_path indexer_* faiss_*
qa_data_* val_av_rank_* num_classes img_* num_channels patch_dim classes_fraction vision_pretraining_type
vision_backbone_type swin_backbone_type mask_type mask_factor iter_per_epoch dino_*

moe_aux_loss_coeff moe_z_loss_coeff moe_input_jitter_eps moe_router_bias_update_rate moe_token_dispatcher_type
moe_token_drop_policy moe_token_dropping moe_pad_expert_input_to_capacity moe_grouped_gemm moe_use_legacy_grouped_gemm
moe_use_grouped_tensor moe_single_grouped_* moe_permute_fusion moe_router_fusion moe_router_padding_for_*
moe_enable_deepep moe_flex_dispatcher_backend moe_deepep_* moe_hybridep_* moe_ncclep_* moe_paged_stash*
moe_expert_rank_capacity_factor moe_shared_expert_overlap moe_layer_recompute moe_per_layer_logging moe_use_upcycling
moe_upcycling_granularity moe_enable_routing_replay moe_routing_trace_path moe_pad_experts_for_* mtp_loss_scaling_factor
mtp_standalone keep_mtp_spec_in_bf16

{WITH_LIMITED}
"""
"""Arguments that never change what a model computes, precision aside. ``*``: any ending."""

HANDED_ON = {"rope_scaling_factor": 8.0, "rotary_seq_len_interpolation_factor": None}
"""What core's GPT computes with, whatever is saved: Megatron-LM's pretrain_gpt.py doesn't hand these to its model.

Forks do, and so did the models before core.
"""

LATEST = {
    "num_experts": "a mixture of experts",
    "multi_latent_attention": "multi-latent attention",
    "mtp_num_layers": "multi-token prediction",
    "attention_output_gate": "gates on the output of attention",
    **dict.fromkeys(
        ("hybrid_layer_pattern", "hybrid_override_pattern", "is_hybrid_model"), "a pattern of kinds of layers"
    ),
    **dict.fromkeys(("hybrid_attention_ratio", "hybrid_mlp_ratio"), "a pattern of kinds of layers"),
    **dict.fromkeys(("experimental_attention_variant", "linear_attention_type"), "gated delta nets"),
}
"""Arguments that add to what a layer of core's has, which only its GPT has here."""

_OF_LATEST = {"num_experts": ("moe_", "expert_"), "mtp_num_layers": ("mtp_",)}  # what only has an effect with them

_NAMES = {name for name in f"{READ} {WITHOUT_EFFECT}".split() if not name.endswith("*")}
_PREFIXES = tuple(name[:-1] for name in WITHOUT_EFFECT.split() if name.endswith("*"))


def limits(values: Mapping[str, Any]) -> list[str]:
    """What the model has and isn't available here, each with its argument and value."""
    return [
        f"{title} ({name} = {value!r})"
        for name, (title, allowed) in LIMITED.items()
        if (value := values.get(name))
        and not all(each in allowed for each in (value if name == _SEVERAL and isinstance(value, list) else [value]))
        and not (values.get("quick_geglu") and name in OF_QUICK_GEGLU)
        and not (values.get("multi_latent_attention") and (name, value) == ("rope_type", "yarn"))
        and not _is_idle(name, values)
    ]


def _is_idle(name: str, values: Mapping[str, Any]) -> bool:
    """Whether the argument belongs to something that the model doesn't have."""
    if name.startswith("gdn_"):
        return not has_delta_nets(values)
    owners = (owner for owner, prefixes in _OF_LATEST.items() if name.startswith(prefixes))
    return any(not values.get(owner) for owner in owners)


def has_delta_nets(values: Mapping[str, Any]) -> bool:
    """Whether the arguments describe a model with gated delta nets."""
    patterns = ("hybrid_layer_pattern", "hybrid_override_pattern", "mtp_hybrid_override_pattern")
    is_lettered = any("G" in str(values.get(name) or "") for name in patterns)
    return is_lettered or any(values.get(name) for name in ("experimental_attention_variant", "linear_attention_type"))


def unknown(values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that are in no table and are not empty, zero or off."""
    return {
        name: value
        for name, value in sorted(values.items())
        if not (
            name in _NAMES or name in LIMITED or name.startswith(_PREFIXES) or _is_off(value) or _is_idle(name, values)
        )
    }


def _is_off(value: Any) -> bool:
    return value is None or (isinstance(value, bool | int | float | str | list | tuple | dict) and not value)


def without(values: Mapping[str, Any], ignored: Collection[str], *, where: str) -> dict[str, Any]:
    """The arguments without the ``ignored`` ones; CheckpointError for one that can't be ignored."""
    can = {*unknown(values), *(name for name in HANDED_ON if values.get(name) is not None)}
    wrong = sorted(set(ignored) - can)
    if wrong:
        raise CheckpointError(
            f"{FLAG} {' '.join(wrong)}: of the arguments in {where}, those that can be ignored are "
            f"{', '.join(sorted(can)) or 'none'}"
        )
    return {name: value for name, value in values.items() if name not in ignored}


def not_handed_on(model: ModelConfig, *, was_trained_there: bool) -> list[str]:
    """Warnings about settings of ``model`` that Megatron-LM's core has and its pretrain_gpt.py doesn't compute with."""
    if model.position_embedding_type != "rope":
        return []
    advice = f"if that trained this model, add {FLAG}" if was_trained_there else "pass it to GPTModel:"
    return [
        f"warning: {name} is {getattr(model, name)}, which Megatron-LM's pretrain_gpt.py ignores and forks of it use; "
        f"{advice} {name}"
        for name, default in HANDED_ON.items()
        if getattr(model, name) != default and (model.use_rope_scaling or name != "rope_scaling_factor")
    ]


def refuse(where: str, limited: list[str], values: Mapping[str, Any]) -> None:
    """Raise CheckpointError, in one sentence, for what the model has and for arguments that are unknown."""
    strange = unknown(values)
    parts = [f"is a model with {enumeration(limited)}, which is not available"] if limited else []
    if strange:
        listed = ", ".join(f"{name} = {str(value)[:60]}" for name, value in strange.items())
        parts.append(
            f"was saved with unknown arguments that may change what the model computes: {listed} ({FLAG} NAME for "
            "each that does not)"
        )
    if parts:
        raise CheckpointError(f"{where} {' and '.join(parts)}")
