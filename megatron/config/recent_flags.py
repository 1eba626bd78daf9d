"""Flags that Megatron-LM added after 0.12, with the verdict on each: no effect here, or not available."""

from __future__ import annotations

_TUNING = "it tunes a library or network feature that is not used"

# flags without dashes, and why they have no effect
RECENT_IGNORED: tuple[tuple[str, str], ...] = (
    (
        "use-te-activation-func use-fused-weighted-squared-relu disable-jit-fuser",
        "the fastest kernels are always used, and fusion never changes results",
    ),
    (
        "use-sharp sharp-enabled-group use-nccl-ub disable-symmetric-registration high-priority-stream-groups "
        "nccl-all-reduce-for-prefill symmetric-ar-type",
        _TUNING,
    ),
    (
        "ckpt-fully-parallel-load-exchange-algo ckpt-fully-parallel-save-process-group "
        "ckpt-fully-parallel-load-process-group ckpt-fully-parallel-save-replicate-local "
        "ckpt-fully-parallel-load-replicate-local ckpt-load-validate-sharding-integrity "
        "dist-ckpt-save-pre-mcore-014 distrib-optim-fully-reshardable-mem-efficient no-strict-fsdp-dtensor-load "
        "async-strategy async-ckpt-cpu-priority async-ckpt-io-priority async-ckpt-use-cpu-shm",
        "checkpoints are always written and read in parallel by torch.distributed.checkpoint",
    ),
    (
        "no-save-tokenizer-assets",
        "the tokenizer's small files stay in the checkpoint",
    ),
    (
        "legacy-tokenizer tokenizer-metadata tokenizer-hf-no-use-fast tokenizer-sentencepiece-legacy",
        "each kind of tokenizer has one implementation; --tokenizer-type chooses it",
    ),
    (
        "mid-level-dataset-surplus allow-ambiguous-pad-tokens",
        "the number of samples is exact, and padding is masked by position, not by token",
    ),
    (
        "enable-experimental exit-signal-handler-for-dataloader exit-signal-handler-for-training",
        "no feature depends on it",
    ),
    (
        "log-throughput-to-tensorboard throughput-window-size log-runtime-to-tensorboard runtime-time-unit "
        "log-memory-interval memory-keys log-device-memory-used log-l2-norm-grad-to-tensorboard "
        "log-max-attention-logit dump-param-to-param-group-map save-config-filepath filter-warnings "
        "no-filter-warnings modules-to-filter set-level-for-all-loggers",
        "that metric is not available; see --log-throughput, --log-memory-to-tensorboard and --log-params-norm",
    ),
    (
        "use-legacy-static-engine decode-only-cuda-graphs mlp-chunks-for-prefill disable-chunked-prefill "
        "inference-wandb-logging-step-interval inference-max-batch-size inference-ckpt-non-strict cache-mla-latents",
        "it is a setting of text generation, not of training",
    ),
    (
        "ddp-reduce-scatter-with-fp32-accumulation",
        "gradients are reduced in fp32 unless --grad-reduce-in-bf16",
    ),
    (
        "distributed-timeout-seconds-after-init",
        "--distributed-timeout-minutes applies from startup to the end",
    ),
    (
        "delay-wgrad-compute",
        "--pipeline-schedule zb-h1 and zb-v defer weight gradients",
    ),
)

# flags without dashes, and what to do instead
RECENT_REFUSED: tuple[tuple[str, str], ...] = (
    (
        "softmax-type",
        "attention with another softmax is not available yet; leave it out",
    ),
    (
        "window-attn-skip-freq",
        "attention within a window is not available yet; leave it out for full attention",
    ),
    (
        "qk-l2-norm",
        "an L2 norm of queries and keys is not available yet; --qk-layernorm has learned weights",
    ),
    (
        "no-rope-freq",
        "layers without rotary positions are not available yet; leave it out",
    ),
    (
        "rope-type",
        "YaRN is not available yet; leave it out, or use --use-rope-scaling as Llama 3 does",
    ),
    (
        "quick-geglu activation-func-clamp-value glu-linear-offset",
        "it is not available yet; the gated MLPs are --swiglu and --geglu",
    ),
    (
        "embedding-init-method-std",
        "a separate standard deviation for embeddings is not available yet; use --init-method-std",
    ),
    (
        "no-weight-decay-cond-type",
        "weight decay always applies to matrices and not to norms and biases; leave it out",
    ),
    (
        "outer-dp-sharding-strategy enable-full-sharding-in-hsdp torch-fsdp2-no-reshard-after-forward",
        "ZeRO 2 and 3 are not available yet; --use-distributed-optimizer shards optimizer state (ZeRO 1)",
    ),
    (
        "reuse-grad-buf-for-mxfp8-param-ag kitchen-config-file kitchen-recipe-number te-precision-config-file",
        "fp8 is not available yet; train with --bf16",
    ),
    (
        "overlap-moe-expert-parallel-comm",
        "mixture of experts is not available yet; leave it out for a dense model",
    ),
    (
        "load-main-params-from-ckpt",
        "fp32 master weights are loaded with the optimizer state; leave out --no-load-optim",
    ),
    (
        "save-params-interval save-activations-interval save-tokens-per-expert-interval save-wgrads-interval "
        "save-dgrads-interval",
        "single tensors are not written; --save-interval writes checkpoints",
    ),
    (
        "verify-integrity",
        "tools/checkpoint/inspect.py verifies checkpoints; leave it out",
    ),
    (
        "most-recent-k",
        "give --keep-last-checkpoints",
    ),
    (
        "padded-vocab-size",
        "give --make-vocab-size-divisible-by: this size divided by --tensor-model-parallel-size",
    ),
    (
        "no-pad-vocab-size",
        "give --make-vocab-size-divisible-by 1",
    ),
    (
        "tokenizer-special-tokens",
        "give --tiktoken-special-tokens",
    ),
    (
        "exit-signal",
        "--exit-signal-handler reacts to SIGTERM only",
    ),
    (
        "start-eval-at-iter eval-global-batch-size",
        "evaluation starts at the first --eval-interval and uses --global-batch-size; leave it out",
    ),
    (
        "validation-set-names",
        "give the names with the paths: --multiple-validation-sets --valid-data-path NAME=PREFIX",
    ),
    (
        "gpu-sniff-test-interval inprocess-restart",
        "torchrun or Slurm restarts ranks, and --load resumes the run; leave it out",
    ),
    (
        "perform-rl-step",
        "reinforcement learning is not available: this project pretrains; leave it out",
    ),
    (
        "disable-mamba-mem-eff-path",
        "Mamba and hybrid models are not available yet; leave it out for a transformer",
    ),
)

# prefixes of flags, known by name or not, and what to do instead
RECENT_FAMILIES: dict[str, str] = {
    "--inprocess-": "torchrun or Slurm restarts ranks, and --load resumes the run; leave it out",
    "--muon-": "the Muon optimizer is not available yet; use --optimizer adam",
}
