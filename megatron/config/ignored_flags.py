"""Flags of Megatron-LM that are accepted and have no effect here, each with the reason that is printed."""

from __future__ import annotations

# flags without dashes, and why they have no effect
IGNORED: tuple[tuple[str, str], ...] = (
    (
        "no-masked-softmax-fusion no-bias-swiglu-fusion no-bias-dropout-fusion no-rope-fusion "
        "no-persist-layer-norm no-gradient-accumulation-fusion no-gradient-reduce-div-fusion "
        "no-async-tensor-model-parallel-allreduce",
        "the fastest kernels are always used, and fusion never changes results",
    ),
    (
        "cross-entropy-loss-fusion cross-entropy-fusion-impl",
        "the cross-entropy loss is always fused with the output layer",
    ),
    (
        "no-bias-gelu-fusion",
        "GELU is the tanh approximation unless --exact-gelu, which is what Megatron-LM computes with this flag",
    ),
    (
        "openai-gelu gelu-tanh",
        "GELU is the tanh approximation unless --exact-gelu is given",
    ),
    (
        "fp16-lm-cross-entropy",
        "the cross-entropy loss is always computed in fp32",
    ),
    (
        "calculate-per-token-loss",
        "the loss is always the mean over all tokens of the global batch",
    ),
    (
        "no-query-key-layer-scaling",
        "attention scores are never scaled by the layer number",
    ),
    (
        "use-cpu-initialization no-initialization init-model-with-meta-device",
        "initial weights depend only on --seed and the parameter's name, on any device",
    ),
    (
        "data-parallel-random-init",
        "initial weights are the same on every data-parallel rank, and dropout masks differ",
    ),
    (
        "te-rng-tracker inference-rng-tracker",
        "random numbers depend only on --seed, sample, layer and rank, with every kernel",
    ),
    (
        "use-mcore-models use-legacy-models",
        "there is one model implementation",
    ),
    (
        "transformer-impl",
        "all layers are PyTorch modules; Transformer Engine is not used",
    ),
    (
        "tp-comm-overlap tp-comm-overlap-cfg tp-comm-overlap-rs-dgrad disable-tp-comm-overlap-ag "
        "disable-tp-comm-overlap-rs disable-tp-comm-bulk-dgrad disable-tp-comm-bulk-wgrad "
        "disable-tp-comm-split-ag disable-tp-comm-split-rs tp-comm-bootstrap-backend",
        "it tunes Transformer Engine's communication overlap, and Transformer Engine is not used",
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
        "a missing or unexpected tensor in a checkpoint is always an error",
    ),
    (
        "no-align-grad-reduce no-align-param-gather ddp-pad-buckets-for-high-nccl-busbw ddp-average-in-collective "
        "no-contiguous-buffers-in-local-ddp DDP-impl suggested-communication-unit-size "
        "overlap-param-gather-with-optimizer-step",
        "there is one layout of gradient buckets; --ddp-bucket-size sets their size",
    ),
    (
        "overlap-p2p-communication-warmup-flush",
        "pipeline communication always overlaps computation, also in warm-up and flush; --no-overlap-p2p-communication "
        "turns the overlap off",
    ),
    (
        "no-scatter-gather-tensors-in-pipeline use-ring-exchange-p2p pipeline-model-parallel-comm-backend",
        "pipeline ranks use plain sends and receives of --distributed-backend",
    ),
    (
        "defer-embedding-wgrad-compute wgrad-deferral-limit",
        "the gradient of the output layer is computed with the loss; --pipeline-schedule zb-h1 and zb-v defer weight "
        "gradients",
    ),
    (
        "no-clone-scatter-output-in-embedding",
        "no clone is made",
    ),
    (
        "distribute-saved-activations distribute-checkpointed-activations",
        "--sequence-parallel splits the saved activations over tensor-parallel ranks",
    ),
    (
        "disable-gloo-process-groups",
        "no additional gloo process groups are created",
    ),
    (
        "local-rank local_rank",
        "the local rank is read from the environment variable LOCAL_RANK",
    ),
    (
        "no-create-attention-mask-in-dataloader",
        "the data loader never builds an attention mask",
    ),
    (
        "num-dataset-builder-threads",
        "one process builds the index of a data set, usually in less than a second",
    ),
    (
        "mmap-warmup",
        "memory-mapped files are not read in advance",
    ),
    (
        "train-sync-interval",
        "ranks already synchronize at every optimizer step",
    ),
    (
        "log-batch-size-to-tensorboard no-log-learnig-rate-to-tensorboard",
        "batch size and learning rate are always written to TensorBoard",
    ),
    (
        "no-one-logger one-logger-project one-logger-run-name one-logger-async app-tag-run-name app-tag-run-version",
        "NVIDIA's one logger is not supported; --wandb-project and --tensorboard-dir report metrics",
    ),
    (
        "logging-level",
        "all messages are printed; there are no logging levels",
    ),
    (
        "config-logger-dir",
        "the run's settings are printed at the start and saved in every checkpoint",
    ),
    (
        "rerun-mode",
        "there is no rerun engine; --no-check-for-nan-in-loss-and-grad turns the check for non-finite losses off",
    ),
    (
        "inference-batch-times-seqlen-threshold max-tokens-to-oom flash-decode inference-logging-step-interval",
        "it is a setting of text generation, not of training",
    ),
    (
        "nccl-communicator-config-path",
        "there is no configuration file of communicators; set NCCL's environment variables",
    ),
    (
        "ckpt-format",
        "checkpoints have the format of torch.distributed.checkpoint; tools/checkpoint/convert.py converts others",
    ),
)
