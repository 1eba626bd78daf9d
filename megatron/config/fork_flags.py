"""Flags of Megatron-LM's forks (Megatron-DeepSpeed, BigScience's and BigCode's, Megatron-LLM, Habana's, MindSpeed,
Pai-Megatron-Patch): those without effect here, and those that stop the run. Those that name a setting are in
``renamed_flags``.
"""

from __future__ import annotations

# flags without dashes, and why they have no effect
FORKS_IGNORED: tuple[tuple[str, str], ...] = (
    (
        "deepspeed deepspeed-mpi deepspeed_mpi",
        "training runs on PyTorch alone; --use-distributed-optimizer is ZeRO 1",
    ),
    (
        "deepspeed-activation-checkpointing partition-activations contigious-checkpointing synchronize-each-layer "
        "profile-backward split-transformers memory-centric-tiled-linear tile-factor scattered-embeddings",
        "it tunes DeepSpeed's recomputation; --recompute-granularity says what is recomputed, and --sequence-parallel "
        "divides what is kept",
    ),
    (
        "no-pipeline-parallel",
        "--pipeline-model-parallel-size alone says whether there is a pipeline",
    ),
    (
        "zero-contigious-gradients zero-reduce-scatter zero-reduce-bucket-size zero-allgather-bucket-size "
        "use-pin-memory use-contiguous-parameters-in-local-ddp",
        "gradient buckets are laid out and reduced in one way; --ddp-bucket-size sets their size",
    ),
    (
        "use-mpi",
        "rank and world size are read from the variables that torchrun or srun sets; with mpirun, set RANK, WORLD_SIZE "
        "and LOCAL_RANK for each process",
    ),
    (
        "structured-logs structured-logs-dir transformer-timers log-path log-optimizer-states-to-tensorboard "
        "codecarbon-dir log-level log-level-replica",
        "it is not written; --tensorboard-dir and --timing-log-level say what is",
    ),
    (
        "wandb-logger wandb-id wandb-tags wandb-model wandb-optimizer wandb-optimizer-version wandb-save-code "
        "wandb-save_code",
        "--wandb-project turns Weights & Biases on, and --wandb-exp-name names the run",
    ),
    (
        "valid-num-workers",
        "--num-workers holds for training and for evaluation",
    ),
    (
        "abort-on-unmet-fused-kernel-constraints use-fused-rmsnorm use-fused-swiglu use-fused-rotary-pos-emb "
        "use-fused-sdpa use-fused-sdpa-with-recompute use-fast-softmax use-fused-layer-norm use-torch-compile "
        "use-torch-compiled-autograd compiled-autograd-fallback-mode use-mc2 mem-efficient-ln no-mem-efficient-ln "
        "async-tensor-model-parallel-allreduce use-cp-send-recv-overlap use-fused-ring-attention-update",
        "which kernels are fused is decided by what is faster, and never changes results",
    ),
    (
        "reuse-fp32-param swap-attention",
        "it saves memory on one maker's devices; --use-distributed-optimizer and --recompute-granularity save it here",
    ),
    (
        "tokenizer-not-use-fast trust-remote-code tokenizer-padding-side",
        "tokenizers are read by the tokenizers library, which runs no code of a model's repository and pads nothing",
    ),
    (
        "reset-progress",
        "--finetune starts at iteration 0",
    ),
    (
        "kill-switch-path",
        "no file stops a run; --exit-signal-handler saves and stops it on SIGTERM",
    ),
    (
        "zero-bubble-pipeline-timers-start-iter zero-bubble-pipeline-timers-end-iter zero-bubble-max-pending-backward "
        "enable-optimizer-post-validation enable-exactly-numeric-match",
        "schedules are planned before the run, and the optimizer's step waits for all gradients",
    ),
    (
        "gemm-gradient-accumulation-fusion no-shared-storage optimizer-selection",
        "there is one way to accumulate gradients, to share files and to compute AdamW",
    ),
    (
        "repeated-dataloader resume-dataloader",
        "data is repeated for as many epochs as --train-iters or --train-samples need",
    ),
    (
        "model-name model-type-hf handler-name",
        "the sizes and switches say which model is trained",
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
        "nothing is kept in the CPU's memory; --recompute-granularity full, --use-distributed-optimizer and more "
        "model-parallel ranks save GPU memory",
    ),
    (
        "remote-device",
        "weights stay on the GPU; --tensor-model-parallel-size and --pipeline-model-parallel-size divide them",
    ),
    (
        "universal-checkpoint",
        "every checkpoint loads at any layout; one of DeepSpeed's cannot be read",
    ),
    (
        "pad-vocab-size-to",
        "give --make-vocab-size-divisible-by: this size divided by --tensor-model-parallel-size",
    ),
    (
        "vocab-extra-ids-list extra-vocab-size",
        "the tokenizer's own special tokens count; --make-vocab-size-divisible-by pads the vocabulary",
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
        "no iteration can be skipped yet; resume from a checkpoint before it with another --seed",
    ),
    (
        "train-tokens lr-decay-tokens lr-warmup-tokens",
        "lengths are counted in samples: give --train-samples, --lr-decay-samples and --lr-warmup-samples, which are "
        "tokens divided by --seq-length",
    ),
    (
        "curriculum-learning curriculum-learning-legacy data-efficiency-curriculum-learning random-ltd "
        "train-data-exact-num-epochs",
        "every sample is used once an epoch at its full length; leave it out",
    ),
    (
        "kd load-teacher compression-training mos",
        "distillation is not available yet; leave it out",
    ),
    (
        "parallel-attn parallel-layernorm use-post-ln post-norm",
        "each layer has its norms before attention and MLP, one after the other; leave it out for another model",
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
        "it belongs to Gemma's layers, which are not available yet; --apply-layernorm-1p stores norm weights minus one",
    ),
    (
        "loss-on-targets-only norm-target-loss prompt-type is-instruction-dataset stage data-type train-mode dataset "
        "max-padding-length no-pad-to-seq-lengths",
        "instruction data is made by tools/preprocess_sft.py and trained on with --sft; for pretraining leave it out",
    ),
    (
        "enable-hf2mg-convert load-hf-checkpoint",
        "convert the model first: tools/checkpoint/convert.py",
    ),
    (
        "recompute-activation-function recompute-activation-function-num-layers recompute-norm "
        "recompute-norm-num-layers enable-recompute-layers-per-pp-rank recompute-in-advance recompute-in-bubble",
        "what is recomputed is chosen by --recompute-granularity full or --recompute-granularity selective",
    ),
    (
        "train-data valid-data-file lazy-loader loose-json text-key presplit-sentences cache-dir use-tfrecords",
        "text is made into PREFIX.bin and PREFIX.idx by tools/preprocess_data.py, and read with --data-path PREFIX",
    ),
    (
        "tokenizer-model-type tokenizer-path",
        "tokenizers are read from files: --vocab-file and --merge-file, or --tokenizer-model",
    ),
    (
        "max-preds-per-seq",
        "as many words are hidden as their share of each sample; leave it out",
    ),
    (
        "fp32-embedding fp32-tokentypes fp32-layernorm",
        "one format holds for all weights, and master weights are fp32; leave it out",
    ),
    (
        "varuna",
        "pipelines are those of --pipeline-model-parallel-size; leave it out",
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
