"""Flags of Megatron-LM and its forks that are not settings here: renamed, ignored with a remark, or refused.

None is ignored silently: a flag without its effect is reported, and refused where the effect would be missed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from megatron.config.computed_flags import COMPUTED, Computed
from megatron.config.ignored_flags import IGNORED
from megatron.config.refused_flags import REFUSED
from megatron.config.suggestions import parts_of


@dataclass(frozen=True)
class LegacyFlag:
    """How a flag is treated.

    ``word``: why it has no effect, or what to do instead. ``sets``: with ``renamed``, the fields that are meant and
    their values; None stands for the words that follow the flag. ``harmless``: values that ask for the behaviour of
    this program, accepted without a remark. ``yields``: it applies only if the field itself is not given. ``values``:
    verdicts on single values; they take precedence over the flag's own. ``computed``: finds what is meant when all
    flags are read.
    """

    verdict: Literal["renamed", "ignored", "refused", "computed"]
    word: str = ""
    sets: Mapping[str, Any] = field(default_factory=dict)
    harmless: tuple[str, ...] = ()
    yields: bool = False
    values: Mapping[str, LegacyFlag] = field(default_factory=dict)
    computed: Computed | None = None


def taken_as(word: str = "", *, yields: bool = False, **sets: Any) -> LegacyFlag:
    """A flag that sets other fields."""
    return LegacyFlag("renamed", word, sets, yields=yields)


def legacy_table(
    same_value: Mapping[str, str],
    others: Mapping[str, LegacyFlag],
    *,
    ignored: str,
    refused: str,
    harmless: Mapping[str, str] | None = None,
) -> dict[str, LegacyFlag]:
    """Flags by spelling; in the arguments they are without dashes, and ``NAME*`` is any flag that starts with NAME.

    ``same_value``: fields, and the flags that take the same values. ``harmless``: flags, and their harmless values.
    """
    rows = [(LegacyFlag("renamed", sets={to: None}), names) for to, names in same_value.items()]
    rows += [(legacy, names) for names, legacy in others.items()]
    rows += [(LegacyFlag("ignored", reason), names) for reason, names in _by_reason(ignored)]
    rows += [(LegacyFlag("refused", reason), names) for reason, names in _by_reason(refused)]
    table: dict[str, LegacyFlag] = {}
    for legacy, names in rows:
        for name in names.split():
            assert f"--{name}" not in table, f"two verdicts on --{name}"
            at_no_harm = tuple((harmless or {}).get(name, "").split())
            table[f"--{name}"] = replace(legacy, harmless=at_no_harm) if at_no_harm else legacy
    return table


def _by_reason(text: str) -> Iterator[tuple[str, str]]:
    """Reasons and flags: unindented lines are a reason, the indented ones below it are its flags."""
    for reason, names in re.findall(r"((?:^\S.*\n)+)((?:^ .*\n)+)", text, re.MULTILINE):
        yield " ".join(reason.split()), names


_MULTI_QUERY = taken_as(group_query_attention=True, num_query_groups=1)

_SAME_VALUE = {
    "micro_batch_size": "batch-size",
    "tensor_model_parallel_size": "model-parallel-size tensor-parallel-size",
    "norm_epsilon": "layernorm-epsilon",
    "apply_layernorm_1p": "layernorm-zero-centered-gamma",
    "num_layers": "encoder-num-layers",
    "seq_length": "encoder-seq-length",
    "override_opt_param_scheduler": "override-lr-scheduler",
    "use_checkpoint_opt_param_scheduler": "use-checkpoint-lr-scheduler",
    "recompute_num_layers": "checkpoint-num-layers activations-checkpoint-num-layers",
    "recompute_granularity": "activations-checkpoint-granularity",
    "lr": "learning-rate",
    "num_virtual_stages_per_pipeline_rank": "virtual-pipeline-model-parallel-size",
    "deterministic_mode": "use-deter-comp",
    "wandb_exp_name": "wandb-name",
    "wandb_entity": "wandb-entity-name",
    "wandb_project": "wandb-project-name",
    "tokenizer_model": "tokenizer-file tokenizer-name-or-path",
    "rotary_base": "rope-theta rotary-theta rotary-emb-base rotary-position-embeddings-theta",
    "pipeline_model_parallel_size": "pipeline-parallel-size",
    "untie_embeddings_and_output_weights": "no-tie-embed-logits",
    "accumulate_allreduce_grads_in_fp32": "fp32-allreduce",
    "final_logit_softcapping": "output-logit-softcapping",
    "padded_vocab_size": "pad-vocab-size-to",
    "embedding_multiplier": "embedding-multiplier-scale scale-emb",
    "logits_multiplier": "output-multiplier-scale",
}

_OTHERS = {
    "use-rotary-position-embeddings use-llama2-rotary-position-embeddings": taken_as(position_embedding_type="rope"),
    "use-alibi-position-embeddings": taken_as(position_embedding_type="alibi"),
    "add-rmsnorm-offset": taken_as(apply_layernorm_1p=True),
    "use-rms-norm RMSNorm": taken_as(normalization="RMSNorm"),
    "post-norm": taken_as("it adds norms after the sublayers to those before them", norm_placement="both"),
    "apply-wd-to-qk-layernorm": taken_as(no_weight_decay_cond_type="apply_wd_to_qk_layernorm"),
    "rope-factor": taken_as("it is Llama 3's scaling", use_rope_scaling=True, rope_scaling_factor=None),
    "allgather-cp": taken_as(cp_comm_type="all_gather"),
    "no-pad-vocab-size": taken_as(make_vocab_size_divisible_by=1),
    "enable-zbh1-pipeline": taken_as(pipeline_schedule="zb-h1"),
    "zero-bubble-v-schedule": taken_as(pipeline_schedule="zb-v"),
    "enable-zero-bubble": taken_as(pipeline_schedule="zb-h1", yields=True),
    "apply-query-key-layer-scaling": taken_as(
        "dividing scores by the layer number and multiplying them back in the softmax cancels out",
        attention_softmax_in_fp32=True,
    ),
    "checkpoint-activations": taken_as(recompute_granularity="full"),
    "activations-checkpoint-method": taken_as(recompute_granularity="full", recompute_method=None),
    "num-key-value-heads num-attention-heads-kv": taken_as(group_query_attention=True, num_query_groups=None),
    "use-multiquery-attn": _MULTI_QUERY,
    "ds-sequence-parallel-size": taken_as(context_parallel_size=None, cp_comm_type="a2a"),
    "no-position-embedding": taken_as(position_embedding_type="none", yields=True),
    "fim-data": taken_as(fim_rate=0.5, yields=True),
    "object-storage-cache-path s3-cache-path": taken_as(data_cache_path=None, yields=True),
    "use-flash-attn use-flash-attn-v1 use-flash-attn-v2 use-flash-attn-triton use-flash-attn-builder": taken_as(
        attention_backend="flash", yields=True
    ),
    "warmup": taken_as("it is a fraction of the decay", lr_warmup_fraction=None),
    "enable-full-sharding-in-hsdp": taken_as(outer_dp_sharding_strategy="optim"),
    "zero-stage": LegacyFlag(
        "refused",
        "the stages are 0, 1, 2 and 3, as in --data-parallel-sharding-strategy",
        values={
            "0": taken_as(data_parallel_sharding_strategy="no_shard"),
            "1": taken_as(data_parallel_sharding_strategy="optim"),
            "2": taken_as(data_parallel_sharding_strategy="optim_grads"),
            "3": taken_as(data_parallel_sharding_strategy="optim_grads_params"),
        },
    ),
    "megatron-fsdp-main-grads-dtype megatron-fsdp-grad-comm-dtype": LegacyFlag(
        "refused",
        "gradients are kept and sent in fp32 or, with --bf16, in bf16; give auto, fp32 or bf16",
        values={"bf16": taken_as(grad_reduce_in_bf16=True)},
    ),
    "attention-head-type": LegacyFlag(
        "refused",
        "choose multihead or multiquery, or give --group-query-attention and --num-query-groups",
        values={"multiquery": _MULTI_QUERY},
    ),
    "glu-activation": LegacyFlag(
        "refused",
        "the gated MLPs are --swiglu and --geglu",
        values={"swiglu": taken_as(activation="swiglu"), "geglu": taken_as(activation="geglu_tanh")},
    ),
    "pp-partition-method": LegacyFlag(
        "refused",
        "say what each stage holds with --pipeline-model-parallel-layout",
        values={
            "type:transformer|embedding": taken_as(
                account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True
            )
        },
    ),
    "context-parallel-algo": LegacyFlag(
        "refused",
        "give --cp-comm-type a2a+p2p with --hierarchical-context-parallel-sizes",
        values={
            "megatron_cp_algo": taken_as(cp_comm_type="p2p"),
            "ulysses_cp_algo": taken_as(cp_comm_type="a2a"),
            "hybrid_cp_algo": taken_as(cp_comm_type="a2a+p2p"),
        },
    ),
    "cpu-optimizer swap-optimizer": taken_as(optimizer_cpu_offload=True),
    "fix-router": taken_as(freeze="*.router.*"),
    "use-glm-rope": taken_as(rotary_interleaved=True, rotary_percent=0.5),
    "checkpoint-in-cpu": taken_as(cpu_offloading=True),
    "fp8-e4m3": taken_as(fp8_format="e4m3"),
    "fp8-hybrid": taken_as(fp8_format="hybrid"),
    "moe-layer-recompute": taken_as(recompute_granularity="selective", recompute_modules=("moe",)),
}

_HARMLESS = {
    "megatron-fsdp-main-params-dtype": "fp32 auto",
    "megatron-fsdp-main-grads-dtype": "auto fp32",
    "megatron-fsdp-grad-comm-dtype": "auto fp32",
    "attention-head-type": "multihead",
    "pp-partition-method": "type:transformer",
    "transformer-impl": "local",
    "DDP-impl": "local",
    "cross-entropy-fusion-impl": "native",
    "dist-ckpt-strictness": "raise_all",
    "tp-comm-bootstrap-backend": "nccl",
    "wgrad-deferral-limit": "0",
    "num-dataset-builder-threads": "1",
    "ckpt-format": "torch_dist",
    "data-impl": "mmap infer",
    "sample-rate": "1.0 1",
    "dist-ckpt-format": "torch_dist",
    "ds-sequence-parallel-size": "1",
    "remote-device": "none",
    "most-recent-k": "-1",
    "exit-signal": "SIGTERM SIGINT SIGUSR1 SIGUSR2",
    "mlp-type": "standard",
    "stage": "pt",
    "train-mode": "pretrain",
    "tile-factor": "1",
    "encoder-tensor-model-parallel-size": "0",
    "encoder-pipeline-model-parallel-size": "0",
    "num-experts": "0 1",
    "expert-model-parallel-size": "1",
    "expert-tensor-parallel-size": "1",
    "moe-layer-freq": "1",
    "cuda-graph-impl": "none",
    "attention-mask-type": "causal",
    "cp-window-size": "1",
}

_COMPUTED = {names: LegacyFlag("computed", computed=computed) for names, computed in COMPUTED.items()}

LEGACY_FLAGS = legacy_table(_SAME_VALUE, _OTHERS | _COMPUTED, ignored=IGNORED, refused=REFUSED, harmless=_HARMLESS)
# words that occur in flag names: none of them is treated as a misspelling of another
LEGACY_WORDS = frozenset(part for spelling in LEGACY_FLAGS for part in parts_of(spelling))


def legacy_flag(spelling: str) -> LegacyFlag | None:
    """How ``spelling`` is treated, if it is or was a flag of Megatron-LM or of a fork."""
    families = (legacy for name, legacy in LEGACY_FLAGS.items() if name[-1] == "*" and spelling.startswith(name[:-1]))
    return LEGACY_FLAGS.get(spelling) or next(families, None)
