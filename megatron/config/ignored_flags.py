"""Flags of Megatron-LM and its forks that are accepted and have no effect here, by the reason that is printed.

Reasons stand at the margin, the flags below them without dashes; ``*`` matches any ending.
"""

IGNORED = """
the fastest kernels are always used, and fusion never changes results
    no-masked-softmax-fusion no-bias-swiglu-fusion no-bias-dropout-fusion no-rope-fusion no-persist-layer-norm
    no-gradient-reduce-div-fusion no-async-tensor-model-parallel-allreduce mla-down-proj-fusion
    use-te-activation-func use-fused-weighted-squared-relu disable-jit-fuser abort-on-unmet-fused-kernel-constraints
    use-fused-rmsnorm use-fused-swiglu use-fused-rotary-pos-emb use-fused-sdpa use-fused-sdpa-with-recompute
    use-fast-softmax use-fused-layer-norm use-torch-compile use-torch-compiled-autograd compiled-autograd-fallback-mode
    use-mc2 mem-efficient-ln no-mem-efficient-ln async-tensor-model-parallel-allreduce use-cp-send-recv-overlap
    use-fused-ring-attention-update jit-compile use-ascend-mc2 megatron-cp-in-bnsd use-transformer-engine-op-fuser
    no-moe-router-aux-loss-fusion
the cross-entropy loss is always fused with the output layer
    cross-entropy-loss-fusion cross-entropy-fusion-impl
GELU is the tanh approximation; Megatron-LM computes exact GELU with this flag, as --exact-gelu does here
    no-bias-gelu-fusion
GELU is the tanh approximation unless --exact-gelu is given
    openai-gelu gelu-tanh
the cross-entropy loss is always computed in fp32
    fp16-lm-cross-entropy
the loss is always the mean over all tokens of the global batch
    calculate-per-token-loss
attention scores are never scaled by the layer number
    no-query-key-layer-scaling
the optimizer on the CPU is always torch's fused AdamW
    use-torch-optimizer-for-cpu-offload cpu_torch_adam
initial weights depend only on --seed and the parameter's name, on any device
    use-cpu-initialization no-initialization init-model-with-meta-device
initial weights are the same on every data-parallel rank, and dropout masks differ
    data-parallel-random-init
random numbers depend only on --seed, sample, layer and rank, with every kernel
    te-rng-tracker inference-rng-tracker
there is one model implementation
    use-mcore-models use-legacy-models
scales of --fp8-recipe delayed change after every step
    fp8-interval
products in FP8 add rows of zeros where kernels need them
    moe-router-padding-for-quantization moe-router-padding-for-fp8
the scan of Mamba layers keeps chunk states and recomputes the rest, with every backend
    disable-mamba-mem-eff-path
the scan of Mamba layers keeps its states in fp32, and its convolution in the type of the weights
    mamba-training-ssm-states-dtype mamba-inference-conv-states-dtype mamba-inference-ssm-states-dtype
all layers are PyTorch modules; Transformer Engine is not used
    transformer-impl
it tunes Transformer Engine's communication overlap, and Transformer Engine is not used
    tp-comm-overlap tp-comm-overlap-cfg tp-comm-overlap-rs-dgrad disable-tp-comm-overlap-ag disable-tp-comm-overlap-rs
    disable-tp-comm-bulk-dgrad disable-tp-comm-bulk-wgrad disable-tp-comm-split-ag disable-tp-comm-split-rs
    tp-comm-bootstrap-backend
checkpoints are always written and read in parallel by torch.distributed.checkpoint
    use-dist-ckpt ckpt-fully-parallel-save no-ckpt-fully-parallel-save ckpt-fully-parallel-load
    ckpt-assume-constant-structure use-persistent-ckpt-worker auto-detect-ckpt-format
    ckpt-fully-parallel-load-exchange-algo ckpt-fully-parallel-save-process-group ckpt-fully-parallel-load-process-group
    ckpt-fully-parallel-save-replicate-local ckpt-fully-parallel-load-replicate-local
    ckpt-load-validate-sharding-integrity dist-ckpt-save-pre-mcore-014 distrib-optim-fully-reshardable-mem-efficient
    no-strict-fsdp-dtensor-load async-strategy async-ckpt-cpu-priority async-ckpt-io-priority async-ckpt-use-cpu-shm
optimizer state always loads at any layout
    dist-ckpt-optim-fully-reshardable
a missing or unexpected tensor in a checkpoint is always an error
    dist-ckpt-strictness
there is one layout of gradient buckets; --ddp-bucket-size sets their size
    no-align-grad-reduce no-align-param-gather ddp-average-in-collective
    no-contiguous-buffers-in-local-ddp DDP-impl suggested-communication-unit-size
    overlap-param-gather-with-optimizer-step zero-contigious-gradients zero-reduce-scatter zero-reduce-bucket-size
    zero-allgather-bucket-size use-pin-memory use-contiguous-parameters-in-local-ddp
pipeline communication always overlaps computation, also in warm-up and flush; --no-overlap-p2p-communication turns the
overlap off
    overlap-p2p-communication-warmup-flush
pipeline ranks use plain sends and receives of --distributed-backend
    no-scatter-gather-tensors-in-pipeline use-ring-exchange-p2p pipeline-model-parallel-comm-backend
the gradient of the output layer is computed with the loss; --pipeline-schedule zb-h1 and zb-v defer weight gradients
    defer-embedding-wgrad-compute wgrad-deferral-limit
outputs of the embedding are not cloned
    no-clone-scatter-output-in-embedding
--sequence-parallel splits the saved activations over tensor-parallel ranks
    distribute-saved-activations distribute-checkpointed-activations
no additional gloo process groups are created
    disable-gloo-process-groups disable-gloo-group
the local rank is read from the environment variable LOCAL_RANK
    local-rank local_rank
the data loader never builds an attention mask
    no-create-attention-mask-in-dataloader
one process builds the index of a data set, usually in less than a second
    num-dataset-builder-threads
memory-mapped files are not read in advance
    mmap-warmup
ranks already synchronize at every optimizer step
    train-sync-interval
batch size and learning rate are always written to TensorBoard
    log-batch-size-to-tensorboard no-log-learnig-rate-to-tensorboard
NVIDIA's one logger is not supported; --wandb-project and --tensorboard-dir report metrics
    no-one-logger one-logger-project one-logger-run-name one-logger-async app-tag-run-name app-tag-run-version
all messages are printed; there are no logging levels
    logging-level
the run's settings are printed at the start and saved in every checkpoint
    config-logger-dir
texts are always generated in batches that change at every step, and prompts are read in parts
    inference-dynamic-batching enable-chunked-prefill
it is a setting of text generation, not of training
    inference-batch-times-seqlen-threshold max-tokens-to-oom flash-decode inference-logging-step-interval
    use-legacy-static-engine decode-only-cuda-graphs mlp-chunks-for-prefill
    inference-wandb-logging-step-interval inference-max-batch-size inference-ckpt-non-strict cache-mla-latents
there is no configuration file of communicators; set NCCL's environment variables
    nccl-communicator-config-path
checkpoints have the format of torch.distributed.checkpoint; tools/checkpoint/convert.py converts others
    ckpt-format dist-ckpt-format
it tunes a library or network feature that is not used
    use-sharp sharp-enabled-group disable-symmetric-registration
    nccl-all-reduce-for-prefill symmetric-ar-type
the tokenizer's small files stay in the checkpoint
    no-save-tokenizer-assets
each kind of tokenizer has one implementation; --tokenizer-type chooses it
    legacy-tokenizer tokenizer-metadata tokenizer-hf-no-use-fast tokenizer-sentencepiece-legacy
the number of samples is exact, and padding is masked by position, not by token
    mid-level-dataset-surplus allow-ambiguous-pad-tokens
no feature depends on it
    enable-experimental exit-signal-handler-for-dataloader exit-signal-handler-for-training
that metric is not available; see --log-throughput, --log-memory-to-tensorboard and --log-params-norm
    log-throughput-to-tensorboard throughput-window-size log-runtime-to-tensorboard runtime-time-unit
    log-memory-interval memory-keys log-device-memory-used log-l2-norm-grad-to-tensorboard log-max-attention-logit
    dump-param-to-param-group-map save-config-filepath filter-warnings no-filter-warnings modules-to-filter
    set-level-for-all-loggers log-energy
--distributed-timeout-minutes applies from startup to the end
    distributed-timeout-seconds-after-init
experts are always computed by grouped products, where a library has them for the type
    moe-grouped-gemm moe-use-legacy-grouped-gemm
experts take as many tokens as choose them, without padding
    moe-pad-expert-input-to-capacity
shared experts are always computed while tokens travel to the others
    moe-shared-expert-overlap
routing and its permutations have one implementation
    moe-permute-fusion moe-router-fusion
tokens travel to their experts by all-to-all, with the library of --distributed-backend
    moe-enable-deepep moe-flex-dispatcher-backend moe-deepep-num-sms moe-hybridep-* moe-ncclep-*
--pipeline-schedule zb-h1 and zb-v defer weight gradients
    delay-wgrad-compute
tokens travel to experts before and after each layer of them, not beside another microbatch's pass; results are the same
    overlap-moe-expert-parallel-comm ep-overlap-early-attn-memory-release moe-permutation-async-comm
    moe-allgather-overlap-comm moe-alltoall-overlap-comm
kernels are launched one by one, without CUDA graphs; results are the same
    cuda-graph-* enable-cuda-graph external-cuda-graph cuda-graph-impl optimizer-cuda-graph
weights of ZeRO 3 are gathered layer by layer, and the next layer's meanwhile; results are the same
    megatron-fsdp-version fsdp-double-buffer fsdp-manual-registration
    keep-fp8-transpose-cache-when-using-custom-fsdp keep-fp8-transpose-cache
activations are offloaded by layer, not by module: see --cpu-offloading
    fine-grained-activation-offloading offload-modules
the part of the optimizer state in main memory is set by --optimizer-offload-fraction
    optimizer-offload-policy
every sample has --seq-length tokens
    variable-seq-lengths no-pad-to-seq-lengths
--log-straggler compares the ranks of a run
    use-workload-inspector-server run-workload-inspector-server
torchrun or Slurm restarts ranks, and --load resumes the run; ranks are not restarted inside their processes
    enable-ft-package calc-ft-timeouts inprocess-* gpu-sniff-test-interval
there is no test mode
    test-mode
DeepSpeed is not used; --use-distributed-optimizer is ZeRO 1
    deepspeed deepspeed-mpi deepspeed_mpi
it tunes DeepSpeed's activation checkpointing; see --recompute-granularity and --sequence-parallel
    deepspeed-activation-checkpointing partition-activations contigious-checkpointing synchronize-each-layer
    profile-backward split-transformers memory-centric-tiled-linear tile-factor scattered-embeddings
only --pipeline-model-parallel-size decides whether there is a pipeline
    no-pipeline-parallel
ranks that torchrun, Open MPI's mpirun or srun started are recognized by their environment variables
    use-mpi
that log is not available; see --tensorboard-dir and --timing-log-level
    structured-logs structured-logs-dir transformer-timers log-path log-optimizer-states-to-tensorboard codecarbon-dir
    log-level log-level-replica
--wandb-project turns Weights & Biases on; --wandb-exp-name names the run
    wandb-logger wandb-id wandb-group use-wandb wandb-tags wandb-model wandb-optimizer wandb-optimizer-version
    wandb-save-code wandb-save_code
--num-workers applies to training and evaluation
    valid-num-workers
it saves memory on NPUs; --use-distributed-optimizer and --recompute-granularity save memory here
    reuse-fp32-param swap-attention adaptive-recompute-device-swap
the tokenizers library reads the tokenizer; it runs no remote code and adds no padding
    tokenizer-not-use-fast trust-remote-code tokenizer-padding-side
--finetune starts at iteration 0
    reset-progress
a run is not stopped by a file; --exit-signal-handler saves and stops it on SIGTERM
    kill-switch-path trigger-path
the schedule is computed before the run, without measuring; the optimizer step waits for all gradients
    zero-bubble-pipeline-timers-start-iter zero-bubble-pipeline-timers-end-iter zero-bubble-max-pending-backward
    enable-optimizer-post-validation enable-exactly-numeric-match
there is only one implementation
    gemm-gradient-accumulation-fusion no-shared-storage optimizer-selection enable-zb-runtime
every schedule of the pipeline computes the same gradients
    enable-zbh1-exact-semantics zero-bubble-v-schedule-mem-setup
every checkpoint is verified before it is loaded
    verify-integrity
the teacher's settings and the format of its checkpoint are read from the checkpoint
    export-kd-teacher-model-config export-kd-teacher-ckpt-format teacher-model-config
the run has no such name; --wandb-exp-name names it for Weights & Biases
    job-name job-id
the data is always repeated until --train-iters or --train-samples is reached
    repeated-dataloader resume-dataloader
it tunes a profiler of NPUs; see --use-pytorch-profiler
    profile-level profile-with-cpu profile-with-memory profile-with-stack profile-save-path profile-export-type
    profile-record-shapes profile-data-simplification
the model is defined by its sizes and switches
    model-name model-type-hf handler-name export-te-mcore-model export-legacy-megatron export-default-te-spec
    export-force-local-attention export-model-type
"""
