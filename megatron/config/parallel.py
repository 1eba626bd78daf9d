"""How ranks divide the work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from megatron.config.flags import COUNT, Settings, flag, switch

CpCommType = Literal["p2p", "all_gather", "a2a", "a2a+p2p"]
PipelineScheduleName = Literal["1f1b", "gpipe", "interleaved", "zb-h1", "zb-v"]
OuterShardingStrategy = Literal["no_shard", "optim"]
ShardingStrategy = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]
GroupName = Literal["tp", "cp", "pp", "dp", "dp_cp", "tp_cp", "ep", "ep_tp", "ep_dp"]

SHARDING_STRATEGIES: tuple[ShardingStrategy, ...] = get_args(ShardingStrategy)
"""Sharding strategies by stage of ZeRO."""

MODEL_PARALLEL_FIELDS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
    "pipeline_schedule",
)
"""The fields that --use-mp-args-from-checkpoint-args takes."""


def head_exchange_size(kind: CpCommType, ranks: int, levels: Sequence[int]) -> int:
    """Context-parallel ranks that exchange heads with each other, of ``ranks``; ``levels``: sizes of "a2a+p2p"."""
    if kind == "a2a":
        return ranks
    return levels[0] if kind == "a2a+p2p" else 1


class ParallelConfig(Settings):
    """How ranks divide the work. The data-parallel size is the number of ranks divided by the other sizes."""

    tensor_model_parallel_size: int = flag("Ranks that split each layer's matrices.", default=1, at_least=1)
    pipeline_model_parallel_size: int = flag(
        "Ranks of the pipeline, each with one stage or more.", default=1, at_least=1
    )
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        "Interleave the pipeline, with this many layers in each model chunk.", default=None, at_least=1
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag(
        "Interleave the pipeline, with this many model chunks on each rank.", default=None, at_least=1
    )
    microbatch_group_size_per_virtual_pipeline_stage: int | None = flag(
        "Interleaved schedule: microbatches that pass one chunk before the next chunk runs; one per rank unless given.",
        default=None,
        at_least=1,
    )
    decoder_first_pipeline_num_layers: int | None = flag(
        "Layers of the first pipeline rank; the others share the rest.", default=None, at_least=1
    )
    decoder_last_pipeline_num_layers: int | None = flag(
        "Layers of the last pipeline rank; the others share the rest.", default=None, at_least=1
    )
    account_for_embedding_in_pipeline_split: bool = switch(
        "Count the embedding as a layer when layers are divided over stages."
    )
    account_for_loss_in_pipeline_split: bool = switch(
        "Count output and loss as a layer when layers are divided over stages."
    )
    pipeline_model_parallel_layout: str | None = flag(
        "Contents of the stages, in order: E is the embedding, t a layer, m a layer of multi-token prediction, L the "
        "loss; a bar separates stages; *N repeats the letter, bar or parentheses before it.",
        default=None,
    )
    stage_layers: tuple[int, ...] | None = flag(
        "Layers of each stage, cut by FLOPs where flags don't say how.", default=None, internal=True
    )
    pipeline_schedule: PipelineScheduleName | None = flag(
        "Order of forward and backward passes; zb-h1 and zb-v split the backward pass to fill bubbles. Unless "
        "given: interleaved with virtual stages, else 1f1b.",
        default=None,
    )
    overlap_p2p_communication: bool = switch(
        "Do not overlap pipeline communication with computation.", off="--no-overlap-p2p-communication"
    )
    context_parallel_size: int = flag("Ranks that split every sequence.", default=1, at_least=1)
    cp_comm_type: tuple[CpCommType, ...] = flag(
        "How context-parallel ranks exchange keys and values, one choice for all layers or one per layer. p2p: "
        "keys travel around a ring; all_gather: keys are gathered; a2a: ranks exchange slices of the sequence for "
        "attention heads; a2a+p2p: a2a inside groups of ranks, and a ring between the groups.",
        default=("p2p",),
        renamed_values={"allgather": ("all_gather", "")},
    )
    hierarchical_context_parallel_sizes: tuple[int, ...] | None = flag(
        "With --cp-comm-type a2a+p2p: number of ranks of an a2a group, and of a ring.", default=None, at_least=1
    )
    expert_model_parallel_size: int = flag(
        "Ranks that divide the experts of a layer among them, out of those of tensor, context and data parallelism.",
        default=1,
        at_least=1,
    )
    expert_tensor_parallel_size: int | None = flag(
        "Ranks that split each expert's matrices; --tensor-model-parallel-size unless given.", default=None, at_least=1
    )
    sequence_parallel: bool = switch("Also split activations along the sequence between the tensor-parallel matmuls.")
    use_tp_pp_dp_mapping: bool = switch(
        "Number ranks in the order tensor, context, pipeline, data (fastest first) instead of tensor, context, "
        "data, pipeline."
    )
    use_distributed_optimizer: bool = switch("Shard optimizer state over the data-parallel ranks (ZeRO 1).")
    data_parallel_sharding_strategy: ShardingStrategy | None = flag(
        "What data-parallel ranks divide among them: nothing, optimizer state (ZeRO 1), gradients as well (ZeRO 2), "
        "and weights as well (ZeRO 3); unless given: what --use-distributed-optimizer, --use-torch-fsdp2 and "
        "--use-megatron-fsdp say.",
        default=None,
    )
    num_distributed_optimizer_instances: int = flag(
        "Hybrid sharding: copies of what data-parallel ranks divide. Neighbouring ranks form a copy and divide it; "
        "gradients are summed inside of copies, and then over copies. Divides the data-parallel size.",
        default=1,
        at_least=1,
    )
    outer_dp_sharding_strategy: OuterShardingStrategy = flag(
        "With ZeRO 3 and several copies of --num-distributed-optimizer-instances: divide optimizer state over the "
        "copies, too. Weights and gradients stay divided inside of a copy.",
        default="no_shard",
    )
    use_torch_fsdp2: bool = switch("ZeRO 3. It is done with flat buffers here, as every other stage is.")
    use_megatron_fsdp: bool = switch(
        "ZeRO 3, or the stage of --data-parallel-sharding-strategy.", aliases=("--use-custom-fsdp",)
    )
    torch_fsdp2_no_reshard_after_forward: bool = switch(
        "With ZeRO 3: keep weights that were gathered until the step ends. One gather a step in place of two for every "
        "microbatch, and the memory of ZeRO 2 during it; so it always is with pipeline stages."
    )
    overlap_grad_reduce: bool = switch("Reduce gradients bucket by bucket during the backward pass.")
    overlap_param_gather: bool = switch("Gather updated parameters bucket by bucket during the next forward pass.")
    ddp_bucket_size: int | None = flag(
        "Parameters of one gradient bucket; unless given: max(40 million, 1 million x ranks that reduce together).",
        default=None,
        at_least=1,
        at_most=COUNT,
    )
    gradient_accumulation_fusion: bool | None = flag(
        "Add weight gradients to the gradient buffer inside the matrix product that computes them; unless given: where "
        "it is faster, on GPUs and, in bf16, on CPUs that are slow with it. FP8 products, embedding and output layer "
        "add theirs afterwards.",
        default=None,
    )
    ddp_pad_buckets_for_high_nccl_busbw: bool = switch(
        "Pad gradient buckets to multiples of 65,536 elements, with which NCCL keeps its speed on many nodes."
    )
    ddp_reduce_scatter_with_fp32_accumulation: bool = switch(
        "With --grad-reduce-in-bf16 and --use-distributed-optimizer: send gradients in bf16 and sum them in fp32, "
        "rounding once. Other gradients are summed in fp32 anyway."
    )
    distributed_backend: Literal["nccl", "gloo"] | None = flag(
        "torch.distributed backend; unless given: nccl on GPUs, gloo on CPUs.",
        default=None,
        renamed_values={"nccl2": ("nccl", "")},
    )
    high_priority_stream_groups: tuple[GroupName, ...] = flag(
        "Groups of ranks whose NCCL kernels get a high-priority CUDA stream, e.g. dp_cp for gradients.",
        default=(),
    )
    use_nccl_ub: bool = switch(
        "Allocate the buffers of weights and gradients with NCCL and register them with the data-parallel "
        "communicator, whose collectives then occupy fewer SMs (GPUs with NVSwitch)."
    )
    diloco_workers: int | None = flag(
        "DiLoCo: divide the ranks into this many workers, the slowest axis, each a whole copy of the run's layout. "
        "Workers train apart on samples of their own and meet every --diloco-sync-interval steps.",
        default=None,
        at_least=1,
    )
    diloco_ranks_per_worker: int | None = flag(
        "DiLoCo: ranks of each worker, instead of --diloco-workers: there are as many workers as the launched ranks "
        "make. For torchrun with --nnodes MIN:MAX, which goes on with the ranks that are there.",
        default=None,
        at_least=1,
    )
    distributed_timeout_minutes: float = flag(
        "Minutes a collective may wait for a rank; then the run ends and names the rank.", default=10.0, above=0
    )

    def fuses_accumulation(self, *, is_faster: bool) -> bool:
        """Whether ``gradient_accumulation_fusion`` is on, where it makes a step faster or doesn't."""
        return is_faster if self.gradient_accumulation_fusion is None else self.gradient_accumulation_fusion

    @property
    def keeps_gathered_weights(self) -> bool:
        """With ZeRO 3: whether weights that were gathered stay until the step ends. With pipeline stages they do, as a
        stage begins the forward pass of one microbatch before the backward pass of another.
        """
        return self.torch_fsdp2_no_reshard_after_forward or self.pipeline_model_parallel_size > 1

    @property
    def zero_stage(self) -> int:
        """What data-parallel ranks divide: 0 nothing, 1 optimizer state, 2 gradients as well, 3 weights as well."""
        if self.data_parallel_sharding_strategy is not None:
            return SHARDING_STRATEGIES.index(self.data_parallel_sharding_strategy)
        return 3 if self.use_torch_fsdp2 or self.use_megatron_fsdp else int(self.use_distributed_optimizer)

    @property
    def num_workers(self) -> int:
        """Groups of ranks that train apart between outer steps; 1 without ``diloco_workers``."""
        return self.diloco_workers or 1

    @property
    def etp(self) -> int:
        """Ranks that split each expert's matrices."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def cp_comm_types(self) -> tuple[CpCommType, ...]:
        """The values of ``--cp-comm-type`` that some layer uses; none without context parallelism."""
        return tuple(dict.fromkeys(self.cp_comm_type)) if self.context_parallel_size > 1 else ()

    def head_exchange_size(self, kind: CpCommType) -> int:
        """Context-parallel ranks that exchange slices of the sequence for slices of the heads."""
        return head_exchange_size(kind, self.context_parallel_size, self.hierarchical_context_parallel_sizes or (1,))
