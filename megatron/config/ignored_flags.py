"""Flags of Megatron-LM that are accepted and have no effect here, each with the reason that is printed."""

from __future__ import annotations

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
        "GELU is the tanh approximation unless --exact-gelu, which is what Megatron-LM computes with this flag",
    ),
    (
        "openai-gelu gelu-tanh",
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
        "no-clone-scatter-output-in-embedding",
        "there is no such copy to avoid",
    ),
    (
        "distribute-saved-activations distribute-checkpointed-activations",
        "--sequence-parallel divides what recomputation keeps over tensor-parallel ranks",
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
