"""Flags of Megatron-LM and its forks that name a setting under another name, or as a value of another flag."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ZERO = (
    "ZeRO 2 and 3 are not available yet: gradients and weights are not sharded over data-parallel ranks; "
    "--use-distributed-optimizer shards optimizer state (ZeRO 1), --tensor-model-parallel-size divides weights"
)


@dataclass(frozen=True)
class Renamed:
    """What a flag means: ``sets`` fields to values, where None stands for the words that follow the flag.

    ``word`` is printed with it. ``yields``: it applies only if the field itself is not given.
    """

    sets: Mapping[str, Any]
    word: str = ""
    yields: bool = False


@dataclass(frozen=True)
class ByValue:
    """A flag treated by its value: one of ``meanings``, one of ``harmless`` (already done here), else ``refused``."""

    meanings: Mapping[str, Mapping[str, Any]]
    refused: str
    harmless: tuple[str, ...] = ()


# flags without dashes, and the field that takes the words that follow
SAME_VALUE: Mapping[str, str] = {
    "batch-size": "micro_batch_size",
    "model-parallel-size": "tensor_model_parallel_size",
    "layernorm-epsilon": "norm_epsilon",
    "encoder-num-layers": "num_layers",
    "encoder-seq-length": "seq_length",
    "override-lr-scheduler": "override_opt_param_scheduler",
    "use-checkpoint-lr-scheduler": "use_checkpoint_opt_param_scheduler",
    "checkpoint-num-layers": "recompute_num_layers",
    "activations-checkpoint-num-layers": "recompute_num_layers",
    "activations-checkpoint-granularity": "recompute_granularity",
    "learning-rate": "lr",
    "virtual-pipeline-model-parallel-size": "num_virtual_stages_per_pipeline_rank",
    "use-deter-comp": "deterministic_mode",
    "wandb-name": "wandb_exp_name",
    "wandb-entity-name": "wandb_entity",
    "wandb-project-name": "wandb_project",
    "tokenizer-file": "tokenizer_model",
    "tokenizer-name-or-path": "tokenizer_model",
    "rope-theta": "rotary_base",
    "rotary-theta": "rotary_base",
    "rotary-emb-base": "rotary_base",
    "rotary-position-embeddings-theta": "rotary_base",
    "tensor-parallel-size": "tensor_model_parallel_size",
    "pipeline-parallel-size": "pipeline_model_parallel_size",
    "no-tie-embed-logits": "untie_embeddings_and_output_weights",
    "fp32-allreduce": "accumulate_allreduce_grads_in_fp32",
}

RENAMED: Mapping[str, Renamed] = {
    "use-rotary-position-embeddings": Renamed({"position_embedding_type": "rope"}),
    "use-llama2-rotary-position-embeddings": Renamed({"position_embedding_type": "rope"}),
    "use-rms-norm": Renamed({"normalization": "RMSNorm"}),
    "apply-query-key-layer-scaling": Renamed(
        {"attention_softmax_in_fp32": True},
        "dividing scores by the layer number and multiplying them back in the softmax cancels out",
    ),
    "checkpoint-activations": Renamed({"recompute_granularity": "full"}),
    "activations-checkpoint-method": Renamed({"recompute_granularity": "full", "recompute_method": None}),
    "num-key-value-heads": Renamed({"group_query_attention": True, "num_query_groups": None}),
    "num-attention-heads-kv": Renamed({"group_query_attention": True, "num_query_groups": None}),
    "use-multiquery-attn": Renamed({"group_query_attention": True, "num_query_groups": 1}),
    "ds-sequence-parallel-size": Renamed({"context_parallel_size": None, "cp_comm_type": "a2a"}),
    "no-position-embedding": Renamed({"position_embedding_type": "none"}, yields=True),
    "fim-data": Renamed({"fim_rate": 0.5}, yields=True),
    "object-storage-cache-path": Renamed({"data_cache_path": None}, yields=True),
    "s3-cache-path": Renamed({"data_cache_path": None}, yields=True),
    **dict.fromkeys(
        ("use-flash-attn", "use-flash-attn-v1", "use-flash-attn-v2", "use-flash-attn-triton", "use-flash-attn-builder"),
        Renamed({"attention_backend": "flash"}, yields=True),
    ),
    "warmup": Renamed({"lr_warmup_fraction": None}, "it is a fraction of the decay"),
}

BY_VALUE: Mapping[str, ByValue] = {
    "zero-stage": ByValue({"1": {"use_distributed_optimizer": True}}, ZERO, harmless=("0",)),
    "data-parallel-sharding-strategy": ByValue(
        {"optim": {"use_distributed_optimizer": True}}, ZERO, harmless=("no_shard",)
    ),
    "attention-head-type": ByValue(
        {"multiquery": {"group_query_attention": True, "num_query_groups": 1}},
        "choose multihead or multiquery, or give --group-query-attention and --num-query-groups",
        harmless=("multihead",),
    ),
    "glu-activation": ByValue(
        {"swiglu": {"activation": "swiglu"}, "geglu": {"activation": "geglu_tanh"}},
        "the gated MLPs are --swiglu and --geglu",
    ),
    "pp-partition-method": ByValue(
        {
            "type:transformer|embedding": {
                "account_for_embedding_in_pipeline_split": True,
                "account_for_loss_in_pipeline_split": True,
            }
        },
        "say what each stage holds with --pipeline-model-parallel-layout",
        harmless=("type:transformer",),
    ),
    "context-parallel-algo": ByValue(
        {"megatron_cp_algo": {"cp_comm_type": "p2p"}, "ulysses_cp_algo": {"cp_comm_type": "a2a"}},
        "give --cp-comm-type a2a+p2p with --hierarchical-context-parallel-sizes",
    ),
    "recompute-modules": ByValue(
        {},
        "selective recomputation is that of the attention core only; --recompute-granularity full recomputes layers",
        harmless=("core_attn",),
    ),
}

# values that ask for the behaviour of this program, accepted without a remark
HARMLESS: Mapping[str, tuple[str, ...]] = {
    "--transformer-impl": ("local",),
    "--DDP-impl": ("local",),
    "--cross-entropy-fusion-impl": ("native",),
    "--dist-ckpt-strictness": ("raise_all",),
    "--rerun-mode": ("disabled",),
    "--tp-comm-bootstrap-backend": ("nccl",),
    "--wgrad-deferral-limit": ("0",),
    "--num-dataset-builder-threads": ("1",),
    "--ckpt-format": ("torch_dist",),
    "--data-impl": ("mmap", "infer"),
    "--sample-rate": ("1.0", "1"),
    "--dist-ckpt-format": ("torch_dist",),
    "--num-distributed-optimizer-instances": ("1",),
    "--ds-sequence-parallel-size": ("1",),
    "--remote-device": ("none",),
    "--softmax-type": ("vanilla",),
    "--rope-type": ("rope",),
    "--glu-linear-offset": ("0", "0.0"),
    "--most-recent-k": ("-1",),
    "--exit-signal": ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"),
    "--mlp-type": ("standard",),
    "--extra-vocab-size": ("0",),
    "--stage": ("pt",),
    "--train-mode": ("pretrain",),
    "--tile-factor": ("1",),
    "--error-injection-rate": ("0",),
    "--encoder-tensor-model-parallel-size": ("0",),
    "--encoder-pipeline-model-parallel-size": ("0",),
    "--num-experts": ("0", "1"),
    "--expert-model-parallel-size": ("1",),
    "--expert-tensor-parallel-size": ("1",),
    "--moe-layer-freq": ("1",),
    "--mtp-num-layers": ("0",),
    "--cuda-graph-impl": ("none",),
    "--main-grads-dtype": ("fp32",),
    "--main-params-dtype": ("fp32",),
    "--exp-avg-dtype": ("fp32",),
    "--exp-avg-sq-dtype": ("fp32",),
    "--replication-factor": ("2",),
    "--attention-mask-type": ("causal",),
    "--cp-window-size": ("1",),
}
