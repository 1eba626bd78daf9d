"""Flags of Megatron-LM that are no settings here: each is taken under another name, ignored with a word, or refused.

None is ignored silently: a flag that cannot have its effect says so, or stops the run when the effect would be missed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from megatron.config.suggestions import parts_of
from megatron.config.unavailable_flags import FAMILIES, UNAVAILABLE

Verdict = Literal["renamed", "ignored", "refused"]


@dataclass(frozen=True)
class LegacyFlag:
    """What becomes of a flag.

    ``word``: why it has no effect, or what to do instead. ``harmless``: values that ask for what happens anyway, taken
    without a word. ``field``: with ``renamed``, the field that is meant; it gets ``value``, or the words that follow.
    ``yields``: a renamed flag that only counts where the field itself is not given.
    """

    verdict: Verdict
    word: str = ""
    harmless: tuple[str, ...] = ()
    field: str = ""
    value: Any = None
    yields: bool = False


def legacy_flag(spelling: str) -> LegacyFlag | None:
    """What becomes of ``spelling``, if it is or was a flag of Megatron-LM's."""
    if spelling in LEGACY_FLAGS:
        return LEGACY_FLAGS[spelling]
    family = next((prefix for prefix in FAMILIES if spelling.startswith(prefix)), None)
    return LegacyFlag("refused", FAMILIES[family]) if family else None


RENAMED: dict[str, LegacyFlag] = {
    "--batch-size": LegacyFlag("renamed", field="micro_batch_size"),
    "--model-parallel-size": LegacyFlag("renamed", field="tensor_model_parallel_size"),
    "--layernorm-epsilon": LegacyFlag("renamed", field="norm_epsilon"),
    "--encoder-num-layers": LegacyFlag("renamed", field="num_layers"),
    "--encoder-seq-length": LegacyFlag("renamed", field="seq_length"),
    "--override-lr-scheduler": LegacyFlag("renamed", field="override_opt_param_scheduler"),
    "--use-checkpoint-lr-scheduler": LegacyFlag("renamed", field="use_checkpoint_opt_param_scheduler"),
    "--use-rotary-position-embeddings": LegacyFlag("renamed", field="position_embedding_type", value="rope"),
    "--apply-query-key-layer-scaling": LegacyFlag(
        "renamed",
        "scores divided by the layer number and multiplied back in the softmax are the same scores",
        field="attention_softmax_in_fp32",
        value=True,
    ),
    "--no-position-embedding": LegacyFlag("renamed", field="position_embedding_type", value="none", yields=True),
    "--fim-data": LegacyFlag("renamed", field="fim_rate", value=0.5, yields=True),
    "--s3-cache-path": LegacyFlag("renamed", field="data_cache_path", yields=True),
    "--use-flash-attn": LegacyFlag("renamed", field="attention_backend", value="flash", yields=True),
}

# flags without dashes, and why they have no effect
IGNORED: tuple[tuple[str, str], ...] = (
    (
        "no-masked-softmax-fusion no-bias-swiglu-fusion no-bias-dropout-fusion no-rope-fusion "
        "no-persist-layer-norm no-gradient-accumulation-fusion no-gradient-reduce-div-fusion "
        "no-async-tensor-model-parallel-allreduce",
        "which kernels are fused is decided by what is faster, and never changes results",
    ),
    (
        "cross-entropy-loss-fusion cross-entropy-fusion-impl",
        "the vocabulary loss is always fused and never holds all logits",
    ),
    (
        "no-bias-gelu-fusion",
        "GELU stays the tanh approximation; --exact-gelu gives what Megatron-LM computes with this flag",
    ),
    (
        "openai-gelu",
        "GELU is the tanh approximation unless --exact-gelu",
    ),
    (
        "fp16-lm-cross-entropy",
        "the vocabulary loss is always computed in fp32",
    ),
    (
        "calculate-per-token-loss",
        "the loss is always one sum over all tokens of the global batch divided by their number",
    ),
    (
        "no-query-key-layer-scaling",
        "attention scores are never scaled by layer",
    ),
    (
        "use-cpu-initialization no-initialization init-model-with-meta-device",
        "a weight's initial value depends on seed and name alone, on any device",
    ),
    (
        "data-parallel-random-init",
        "initial weights are the same on every replica and dropout differs, whatever the seed",
    ),
    (
        "te-rng-tracker inference-rng-tracker",
        "random streams follow from seed and rank, with every kernel",
    ),
    (
        "use-mcore-models use-legacy-models",
        "there is one model implementation",
    ),
    (
        "transformer-impl",
        "layers are built on PyTorch alone",
    ),
    (
        "tp-comm-overlap tp-comm-overlap-cfg tp-comm-overlap-rs-dgrad disable-tp-comm-overlap-ag "
        "disable-tp-comm-overlap-rs disable-tp-comm-bulk-dgrad disable-tp-comm-bulk-wgrad "
        "disable-tp-comm-split-ag disable-tp-comm-split-rs tp-comm-bootstrap-backend",
        "it tunes Transformer Engine's overlap of communication, which is not used",
    ),
    (
        "use-dist-ckpt ckpt-fully-parallel-save no-ckpt-fully-parallel-save ckpt-fully-parallel-load "
        "ckpt-assume-constant-structure use-persistent-ckpt-worker auto-detect-ckpt-format",
        "checkpoints are always written and read in parallel by torch.distributed.checkpoint",
    ),
    (
        "dist-ckpt-optim-fully-reshardable",
        "optimizer state always loads at any layout",
    ),
    (
        "dist-ckpt-strictness",
        "a name missing from a checkpoint, or unknown to the model, is always an error",
    ),
    (
        "no-align-grad-reduce no-align-param-gather ddp-pad-buckets-for-high-nccl-busbw ddp-average-in-collective "
        "no-contiguous-buffers-in-local-ddp DDP-impl suggested-communication-unit-size "
        "overlap-param-gather-with-optimizer-step",
        "gradient buckets are laid out and reduced in one way; --ddp-bucket-size sets their size",
    ),
    (
        "overlap-p2p-communication-warmup-flush",
        "pipeline messages overlap computing from the first to the last; --no-overlap-p2p-communication turns that off",
    ),
    (
        "no-scatter-gather-tensors-in-pipeline use-ring-exchange-p2p pipeline-model-parallel-comm-backend",
        "pipeline messages are plain sends and receives on --distributed-backend",
    ),
    (
        "defer-embedding-wgrad-compute wgrad-deferral-limit",
        "the output matrix's gradient is made with the loss; --pipeline-schedule zb-h1 or zb-v defer those of layers",
    ),
    (
        "no-clone-scatter-output-in-embedding distribute-saved-activations",
        "there is no such copy to avoid",
    ),
    (
        "disable-gloo-process-groups",
        "there are no gloo groups beside the main ones",
    ),
    (
        "local-rank local_rank",
        "the local rank is read from LOCAL_RANK",
    ),
    (
        "no-create-attention-mask-in-dataloader",
        "no mask is built while loading; attention is told what it may see",
    ),
    (
        "num-dataset-builder-threads",
        "the index of a data set is built by one process in well under a second",
    ),
    (
        "mmap-warmup",
        "files are mapped, so there is nothing to warm up",
    ),
    (
        "train-sync-interval",
        "ranks are in step at every optimizer step",
    ),
    (
        "log-batch-size-to-tensorboard no-log-learnig-rate-to-tensorboard",
        "batch size and learning rate are always written to TensorBoard",
    ),
    (
        "no-one-logger one-logger-project one-logger-run-name one-logger-async app-tag-run-name app-tag-run-version",
        "nothing is reported to NVIDIA's one logger",
    ),
    (
        "logging-level",
        "what a run says is printed, not filtered by level",
    ),
    (
        "config-logger-dir",
        "the run's settings are printed at the start and saved in every checkpoint",
    ),
    (
        "rerun-mode",
        "the rerun engine does not exist; --no-check-for-nan-in-loss-and-grad turns the check off",
    ),
    (
        "inference-batch-times-seqlen-threshold max-tokens-to-oom flash-decode inference-logging-step-interval",
        "it concerns the generation of text",
    ),
    (
        "nccl-communicator-config-path",
        "no communicator is tuned by file; set NCCL's variables",
    ),
    (
        "ckpt-format",
        "checkpoints are always in torch.distributed.checkpoint's format; tools/checkpoint/convert.py converts others",
    ),
)

# flags without dashes, and what to do instead
REFUSED: tuple[tuple[str, str], ...] = (
    (
        "warmup",
        "say --lr-warmup-fraction 0.01 (of the decay) or --lr-warmup-iters 100",
    ),
    (
        "checkpoint-activations distribute-checkpointed-activations activations-checkpoint-method "
        "activations-checkpoint-num-layers recompute-modules",
        "say what to recompute: --recompute-granularity selective (the attention core), or "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 (whole layers)",
    ),
    (
        "init-method-xavier-uniform",
        "weights start from a normal distribution: --init-method-std 0.02",
    ),
    (
        "onnx-safe",
        "there is no ONNX export; leave it out",
    ),
    (
        "lazy-mpu-init",
        "ranks always meet at the start; leave it out",
    ),
    (
        "decrease-batch-size-if-needed",
        "give a --global-batch-size that divides; --dry-run says which do",
    ),
    (
        "disable-bf16-reduced-precision-matmul",
        "matmuls are accumulated as torch does by default; leave it out",
    ),
    (
        "adlr-autoresume adlr-autoresume-interval",
        "use --exit-signal-handler or --exit-duration-in-mins and start the job again",
    ),
    (
        "yaml-cfg",
        "give --config FILE; settings are named like flags, flat or nested by group",
    ),
    (
        "no-data-sharding",
        "shuffling by --dataloader-type cyclic is always over the whole data set; leave it out",
    ),
    (
        "sample-rate",
        "every sample is used; make a smaller data set or give --train-samples",
    ),
    (
        "bert-binary-head bert-no-binary-head",
        "it belongs to BERT; train one with pretrain_bert.py",
    ),
    (
        "mask-prob short-seq-prob",
        "it belongs to BERT (pretrain_bert.py) and T5 (pretrain_t5.py)",
    ),
    (
        "decoder-num-layers",
        "it belongs to T5 (pretrain_t5.py); for other models say --num-layers",
    ),
    (
        "decoder-seq-length",
        "it belongs to T5 (pretrain_t5.py); for other models say --seq-length",
    ),
    (
        "relative-attention-num-buckets relative-attention-max-distance",
        "it belongs to T5; train one with pretrain_t5.py",
    ),
    (
        "data-impl",
        "data is read from PREFIX.bin and PREFIX.idx, as tools/preprocess_data.py writes them",
    ),
    (
        "ddp-num-buckets",
        "say how large a bucket is: --ddp-bucket-size",
    ),
    (
        "decoupled-lr",
        "one learning rate holds for all parameters: --lr",
    ),
    (
        "decoupled-min-lr",
        "one learning rate holds for all parameters: --min-lr",
    ),
    (
        "use-torch-fsdp2 use-custom-fsdp data-parallel-sharding-strategy "
        "keep-fp8-transpose-cache-when-using-custom-fsdp",
        "shard optimizer state with --use-distributed-optimizer",
    ),
    (
        "num-distributed-optimizer-instances",
        "optimizer state is sharded over all data-parallel ranks; leave it out",
    ),
    (
        "iterations-to-skip",
        "no iteration can be left out yet; leave it out",
    ),
    (
        "error-injection-rate error-injection-type",
        "there is no rerun engine to test; leave it out",
    ),
    (
        "result-rejected-tracker-filename",
        "there is no rerun engine; leave it out",
    ),
    (
        "check-for-spiky-loss",
        "only non-finite losses stop a run; leave it out",
    ),
    (
        "check-for-large-grads",
        "only non-finite gradients stop a run; --clip-grad bounds their norm",
    ),
    (
        "log-energy",
        "energy is not measured; leave it out",
    ),
    (
        "test-mode",
        "leave it out: tests use --mock-data",
    ),
    (
        "ckpt-convert-format ckpt-convert-save ckpt-convert-update-legacy-dist-opt-format",
        "checkpoints are converted by a command of their own, tools/checkpoint/convert.py",
    ),
    (
        "dist-ckpt-format",
        "only torch_dist is written; leave it out",
    ),
    (
        "spec",
        "layers are chosen by model flags, not by code named on the command line; leave it out",
    ),
    (
        "use-workload-inspector-server run-workload-inspector-server",
        "there is no workload inspector; leave it out",
    ),
    (
        "pipeline-model-parallel-split-rank",
        "encoder and decoder are one chain of layers; divide it with --pipeline-model-parallel-layout",
    ),
    (
        "data-parallel-size",
        "data parallelism takes the ranks that the other sizes leave: start more ranks; for --dry-run say --world-size",
    ),
    (
        "encoder-tensor-model-parallel-size",
        "one --tensor-model-parallel-size holds for all layers",
    ),
    (
        "encoder-pipeline-model-parallel-size",
        "one --pipeline-model-parallel-size holds for all layers",
    ),
)

# values that ask for what happens anyway, taken without a word
HARMLESS: dict[str, tuple[str, ...]] = {
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
    "--data-parallel-sharding-strategy": ("no_shard",),
    "--error-injection-rate": ("0",),
    "--encoder-tensor-model-parallel-size": ("0",),
    "--encoder-pipeline-model-parallel-size": ("0",),
    "--num-experts": ("0",),
    "--expert-model-parallel-size": ("1",),
    "--expert-tensor-parallel-size": ("1",),
    "--moe-layer-freq": ("1",),
    "--mtp-num-layers": ("0",),
    "--cuda-graph-impl": ("none",),
    "--main-grads-dtype": ("fp32",),
    "--main-params-dtype": ("fp32",),
    "--exp-avg-dtype": ("fp32",),
    "--exp-avg-sq-dtype": ("fp32",),
    "--profile-ranks": ("0",),
    "--replication-factor": ("2",),
}


def _table() -> dict[str, LegacyFlag]:
    unavailable = ((names, f"{feature} not available{advice}") for feature, advice, names in UNAVAILABLE)
    verdicts: dict[Verdict, Iterable[tuple[str, str]]] = {"ignored": IGNORED, "refused": (*REFUSED, *unavailable)}
    table = dict(RENAMED)
    for verdict, rows in verdicts.items():
        for names, word in rows:
            for name in names.split():
                table[f"--{name}"] = LegacyFlag(verdict, word, HARMLESS.get(f"--{name}", ()))
    return table


LEGACY_FLAGS: dict[str, LegacyFlag] = _table()
# correct parts of flag names: a flag that has one in place of another is no misspelling
LEGACY_WORDS = frozenset(part for spelling in LEGACY_FLAGS for part in parts_of(spelling))
