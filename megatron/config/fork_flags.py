"""Flags of Megatron-LM's forks (Megatron-DeepSpeed, BigScience's and BigCode's, Megatron-LLM, Habana's, MindSpeed,
Pai-Megatron-Patch): those without effect here, and those that stop the run. Those that name a setting are in
``renamed_flags``.
"""

from __future__ import annotations

# flags without dashes, and why they have no effect
FORKS_IGNORED: tuple[tuple[str, str], ...] = (
    (
        "deepspeed deepspeed-mpi deepspeed_mpi",
        "DeepSpeed is not used; --use-distributed-optimizer is ZeRO 1",
    ),
    (
        "deepspeed-activation-checkpointing partition-activations contigious-checkpointing synchronize-each-layer "
        "profile-backward split-transformers memory-centric-tiled-linear tile-factor scattered-embeddings",
        "it tunes DeepSpeed's activation checkpointing; see --recompute-granularity and --sequence-parallel",
    ),
    (
        "no-pipeline-parallel",
        "only --pipeline-model-parallel-size decides whether there is a pipeline",
    ),
    (
        "zero-contigious-gradients zero-reduce-scatter zero-reduce-bucket-size zero-allgather-bucket-size "
        "use-pin-memory use-contiguous-parameters-in-local-ddp",
        "there is one layout of gradient buckets; --ddp-bucket-size sets their size",
    ),
    (
        "use-mpi",
        "ranks that torchrun, Open MPI's mpirun or srun started are recognized by their environment variables",
    ),
    (
        "structured-logs structured-logs-dir transformer-timers log-path log-optimizer-states-to-tensorboard "
        "codecarbon-dir log-level log-level-replica",
        "that log is not available; see --tensorboard-dir and --timing-log-level",
    ),
    (
        "wandb-logger wandb-id wandb-tags wandb-model wandb-optimizer wandb-optimizer-version wandb-save-code "
        "wandb-save_code",
        "--wandb-project turns Weights & Biases on; --wandb-exp-name names the run",
    ),
    (
        "valid-num-workers",
        "--num-workers applies to training and evaluation",
    ),
    (
        "abort-on-unmet-fused-kernel-constraints use-fused-rmsnorm use-fused-swiglu use-fused-rotary-pos-emb "
        "use-fused-sdpa use-fused-sdpa-with-recompute use-fast-softmax use-fused-layer-norm use-torch-compile "
        "use-torch-compiled-autograd compiled-autograd-fallback-mode use-mc2 mem-efficient-ln no-mem-efficient-ln "
        "async-tensor-model-parallel-allreduce use-cp-send-recv-overlap use-fused-ring-attention-update",
        "the fastest kernels are always used, and fusion never changes results",
    ),
    (
        "reuse-fp32-param swap-attention",
        "it saves memory on NPUs; --use-distributed-optimizer and --recompute-granularity save memory here",
    ),
    (
        "tokenizer-not-use-fast trust-remote-code tokenizer-padding-side",
        "the tokenizers library reads the tokenizer; it runs no remote code and adds no padding",
    ),
    (
        "reset-progress",
        "--finetune starts at iteration 0",
    ),
    (
        "kill-switch-path",
        "a run is not stopped by a file; --exit-signal-handler saves and stops it on SIGTERM",
    ),
    (
        "zero-bubble-pipeline-timers-start-iter zero-bubble-pipeline-timers-end-iter zero-bubble-max-pending-backward "
        "enable-optimizer-post-validation enable-exactly-numeric-match",
        "the schedule is computed before the run, without measuring; the optimizer step waits for all gradients",
    ),
    (
        "gemm-gradient-accumulation-fusion no-shared-storage optimizer-selection",
        "there is only one implementation",
    ),
    (
        "repeated-dataloader resume-dataloader",
        "the data is always repeated until --train-iters or --train-samples is reached",
    ),
    (
        "model-name model-type-hf handler-name",
        "the model is defined by its sizes and switches",
    ),
)

# flags without dashes, and what to do instead
FORKS_REFUSED: tuple[tuple[str, str], ...] = (
    (
        "embed-layernorm embedding-norm input-embeds-norm",
        "a norm after the embedding is not available yet; leave it out for another model",
    ),
    (
        "use-alibi-position-embeddings",
        "ALiBi is not available yet; use --position-embedding-type rope",
    ),
    (
        "cpu-optimizer cpu_torch_adam optimizer-offload-policy optimizer-offload cpu-offloading "
        "cpu-offloading-num-layers checkpoint-in-cpu ds-sequence-parallel-fpdt ds-sequence-parallel-fpdt-chunk-size "
        "ds-sequence-parallel-fpdt-offloading",
        "offloading to CPU memory is not available yet; --recompute-granularity full, --use-distributed-optimizer and "
        "more model-parallel ranks save GPU memory",
    ),
    (
        "remote-device",
        "offloading weights is not available yet; --tensor-model-parallel-size divides them",
    ),
    (
        "universal-checkpoint",
        "DeepSpeed's checkpoints cannot be read; checkpoints of this program load at any layout",
    ),
    (
        "pad-vocab-size-to",
        "give --make-vocab-size-divisible-by: this size divided by --tensor-model-parallel-size",
    ),
    (
        "vocab-extra-ids-list extra-vocab-size",
        "add tokens to the tokenizer's files; --make-vocab-size-divisible-by pads the vocabulary",
    ),
    (
        "patch-tokenizer-type",
        "give --tokenizer-type HuggingFaceTokenizer --tokenizer-model FOLDER, with the model's tokenizer.json",
    ),
    (
        "train-weighted-split-paths train-weighted-split-paths-path valid-weighted-split-paths "
        "valid-weighted-split-paths-path test-weighted-split-paths test-weighted-split-paths-path",
        "give the blend of each split with --train-data-path, --valid-data-path and --test-data-path, or all in one "
        "JSON file with --per-split-data-args-path",
    ),
    (
        "skip-train-iteration-range",
        "skipping iterations is not available yet; leave it out",
    ),
    (
        "train-tokens lr-decay-tokens lr-warmup-tokens",
        "lengths in tokens are not available: give --train-samples, --lr-decay-samples and --lr-warmup-samples (tokens "
        "divided by --seq-length)",
    ),
    (
        "curriculum-learning curriculum-learning-legacy data-efficiency-curriculum-learning random-ltd "
        "train-data-exact-num-epochs",
        "curriculum learning and token dropping are not available; leave it out",
    ),
    (
        "kd load-teacher compression-training mos",
        "distillation is not available yet; leave it out",
    ),
    (
        "parallel-attn parallel-layernorm use-post-ln post-norm",
        "layers are pre-norm, with attention and MLP one after the other; leave it out for another model",
    ),
    (
        "window-size sliding-window-size interleave-sliding-window",
        "attention within a window is not available yet; leave it out for full attention",
    ),
    (
        "query-pre-attn-scalar",
        "give --softmax-scale: 1 divided by the root of this number",
    ),
    (
        "output-logit-softcapping attn-logit-softcapping add-rmsnorm-offset",
        "Gemma's layers are not available yet; --apply-layernorm-1p stores norm weights minus one",
    ),
    (
        "loss-on-targets-only norm-target-loss prompt-type is-instruction-dataset stage data-type train-mode dataset "
        "max-padding-length no-pad-to-seq-lengths",
        "for instruction data use tools/preprocess_sft.py and --sft; for pretraining leave it out",
    ),
    (
        "enable-hf2mg-convert load-hf-checkpoint",
        "convert the model first: tools/checkpoint/convert.py",
    ),
    (
        "recompute-activation-function recompute-activation-function-num-layers recompute-norm "
        "recompute-norm-num-layers enable-recompute-layers-per-pp-rank recompute-in-advance recompute-in-bubble",
        "recomputation is --recompute-granularity full (layers) or --recompute-granularity selective (attention core)",
    ),
    (
        "train-data valid-data-file lazy-loader loose-json text-key presplit-sentences cache-dir use-tfrecords",
        "convert text with tools/preprocess_data.py, and give --data-path PREFIX",
    ),
    (
        "tokenizer-model-type tokenizer-path",
        "tokenizers are read from files: --vocab-file and --merge-file, or --tokenizer-model",
    ),
    (
        "max-preds-per-seq",
        "the number of masked words follows from their share; leave it out",
    ),
    (
        "fp32-embedding fp32-tokentypes fp32-layernorm",
        "all weights have one format, and master weights are fp32; leave it out",
    ),
    (
        "varuna",
        "use --pipeline-model-parallel-size for a pipeline; leave it out",
    ),
    (
        "enable-zero-bubble zero-bubble-v-schedule",
        "give --pipeline-schedule zb-h1 or --pipeline-schedule zb-v",
    ),
    (
        "num-experts-teacher expert-interval mlp-type topk noisy-gate-policy create-moe-param-group "
        "disable-moe-token-dropping",
        "mixture of experts is not available yet; leave it out for a dense model",
    ),
    (
        "resume resume-from resume-from-checkpoint",
        "give --load FOLDER: a run goes on from the newest checkpoint there",
    ),
)
