"""Flags of Megatron-LM and its forks that stop the run, by the reason that is printed; written as the ignored ones.

When a feature lands, its flags become fields of a group and its entry here is deleted.
"""

REFUSED = """
weights are initialized from a normal distribution; --init-method-std sets its standard deviation
    init-method-xavier-uniform
there is no ONNX export; leave it out
    onnx-safe
process groups are always initialized at startup; leave it out
    lazy-mpu-init
give a --global-batch-size that is divisible; the error message lists sizes that fit
    decrease-batch-size-if-needed
matmuls use torch's default accumulation; leave it out
    disable-bf16-reduced-precision-matmul
use --exit-signal-handler or --exit-duration-in-mins, and restart the job
    adlr-autoresume adlr-autoresume-interval
give --config FILE; settings are named like flags, flat or nested by group
    yaml-cfg
--dataloader-type cyclic always shuffles the whole data set; leave it out
    no-data-sharding
every sample is used; make a smaller data set, or give --train-samples
    sample-rate
only memory-mapped data (PREFIX.bin and PREFIX.idx, written by tools/preprocess_data.py) is read
    data-impl
give the size of a bucket instead: --ddp-bucket-size
    ddp-num-buckets
convert checkpoints with tools/checkpoint/convert.py
    ckpt-convert-format ckpt-convert-save ckpt-convert-update-legacy-dist-opt-format
encoder and decoder layers form one pipeline; --pipeline-model-parallel-layout divides it
    pipeline-model-parallel-split-rank
the data-parallel size is the number of ranks divided by the other sizes: start more ranks (with --dry-run:
--world-size)
    data-parallel-size
fp32 master weights are loaded with the optimizer state; leave out --no-load-optim
    load-main-params-from-ckpt
single tensors are not written; --save-interval writes checkpoints
    save-params-interval save-activations-interval save-tokens-per-expert-interval save-wgrads-interval
    save-dgrads-interval
give --keep-last-checkpoints
    most-recent-k keep-last
give --data-args-path FILE, with weights and prefixes as --data-path takes them
    data-file-list
attention is causal, and within documents with --reset-attention-mask; leave it out
    attention-mask-type
give --tiktoken-special-tokens
    tokenizer-special-tokens
--exit-signal-handler reacts to SIGTERM, SIGINT, SIGUSR1 and SIGUSR2; send one of these
    exit-signal
evaluation starts at the first --eval-interval and uses --global-batch-size; leave it out
    start-eval-at-iter eval-global-batch-size
give the names with the paths: --multiple-validation-sets --valid-data-path NAME=PREFIX
    validation-set-names
DeepSpeed's checkpoints cannot be read; checkpoints of this program load at any layout
    universal-checkpoint
add tokens to the tokenizer's files; --make-vocab-size-divisible-by pads the vocabulary
    vocab-extra-ids-list
give the blend of each split with --train-data-path, --valid-data-path and --test-data-path, or all in one JSON file
with --per-split-data-args-path
    train-weighted-split-paths train-weighted-split-paths-path valid-weighted-split-paths
    valid-weighted-split-paths-path test-weighted-split-paths test-weighted-split-paths-path
give --norm-placement; the original post-norm transformer is --apply-residual-connection-post-layernorm
    use-post-ln
for instruction data use tools/preprocess_sft.py and --sft; for pretraining leave it out
    loss-on-targets-only norm-target-loss prompt-type is-instruction-dataset stage data-type train-mode dataset
    max-padding-length fix-sub-seq-length neat-pack
start from a Hugging Face model with --load-hf FOLDER
    enable-hf2mg-convert load-hf-checkpoint
recomputation is --recompute-granularity full (layers) or selective, with --recompute-modules
    recompute-activation-function recompute-activation-function-num-layers recompute-norm recompute-norm-num-layers
    enable-recompute-layers-per-pp-rank recompute-in-advance recompute-in-bubble
convert text with tools/preprocess_data.py, and give --data-path PREFIX
    dataset-path train-data valid-data-file lazy-loader loose-json text-key presplit-sentences cache-dir use-tfrecords
tokenizers are read from files: --vocab-file and --merge-file, or --tokenizer-model
    tokenizer-model-type tokenizer-path
the number of masked words follows from their share; leave it out
    max-preds-per-seq
all weights have one format, and master weights are fp32; leave it out
    fp32-embedding fp32-tokentypes fp32-layernorm
use --pipeline-model-parallel-size for a pipeline; leave it out
    varuna
give --load FOLDER: the run resumes from the newest checkpoint there
    resume resume-from resume-from-checkpoint
encoder and decoder share the model-parallel sizes; leave it out
    encoder-tensor-model-parallel-size encoder-pipeline-model-parallel-size
master weights are fp32; leave it out, or give --use-precision-aware-optimizer, which stores them in 17 bits
    megatron-fsdp-main-params-dtype
ZeRO is chosen by --data-parallel-sharding-strategy, not by a file; leave it out
    fsdp2-config-path
it is no setting of Megatron-FSDP that is known here; leave it out
    fsdp-* megatron-fsdp-*
give --window-size with the keys before and after a query
    cp-window-size sliding-window-size
give --position-embedding-type yarn, longrope or dynamic_ntk with --rotary-scaling-factor and
--original-max-position-embeddings, or --use-rope-scaling for Llama 3's scaling
    rope-scaling-* dynamic-factor rotary-scale-factor
adapters are set by --lora-rank, --lora-alpha, --lora-targets, --lora-dropout and --lora-rank-stabilized; leave it out
    lora-*
choose with --activation
    no-swiglu no-geglu no-relu no-squared-relu no-exact-gelu
a separate standard deviation for embeddings is not available yet; use --init-method-std
    embedding-init-method-std
give --fp8-param-gather
    fp8-param
weights of --fp8-recipe mxfp8 are gathered in bf16, and quantized once a step; leave it out
    reuse-grad-buf-for-mxfp8-param-ag
QK-clip (MuonClip), which rescales weights of queries and keys after a step, is not available; use --qk-layernorm,
which bounds the logits of attention as well
    qk-clip*
logits are computed in bf16; leave it out
    fp8-output-proj
attention is computed in bf16, its projections in fp8; leave it out
    fp8-dot-product-attention fp8-multi-head-attention
choose a recipe with --fp8-recipe tensorwise, delayed, blockwise or mxfp8
    fp8-quantizer-factory kitchen-config-file kitchen-recipe-number te-precision-config-file fp8-*
the largest values of --fp8-recipe delayed are one small message a step over all ranks of a stage; leave it out
    tp-only-amax-red
give --moe-layer-freq with the layers that have experts
    expert-interval
give --num-experts and --moe-router-topk
    mlp-type topk
give --moe-router-num-groups with a group for each device, and --moe-router-group-topk
    moe-router-topk-limited-devices
give --expert-tensor-parallel-size
    moe-extended-tp
CUDA graphs of experts, and their buffers, are not available; leave it out
    moe-paged-stash* moe-use-grouped-tensor moe-single-grouped-* moe-mlp-glu-interleave-size
    moe-expert-rank-capacity-factor
choices of experts are not recorded for reinforcement learning; leave it out
    moe-enable-routing-replay
weights of chosen experts multiply their activations; scaling their inputs instead is not available
    moe-apply-probs-on-input
experts in a projected width are not available; leave it out
    moe-latent-size
random numbers on a router's input depend on the layout of ranks; leave it out
    moe-input-jitter-eps
make the checkpoint of experts first, with tools/checkpoint/upcycle.py, and start from it with --load and --finetune
    moe-use-upcycling moe-upcycling-granularity
experts have no such setting here; leave it out
    moe-* num-experts-teacher noisy-gate-policy create-moe-param-group disable-moe-token-dropping
GRPO (--perform-rl-step) has no such setting here; leave it out
    rl-* grpo-*
rewards are those of a function: give --reward-function FILE.py:NAME, and prompts with --grpo-prompts
    langrl-*
it is another program's setting of reinforcement learning; --perform-rl-step trains with GRPO
    rollout-* sglang-* vllm-* advantage-estimator kl-loss-coef kl-loss-type kl-coef use-kl-loss entropy-coef
    eps-clip eps-clip-high use-dynamic-batch-size max-tokens-per-gpu
offloading by chunks of a sequence is not available; --cpu-offloading offloads activations by layer
    ds-sequence-parallel-fpdt ds-sequence-parallel-fpdt-chunk-size ds-sequence-parallel-fpdt-offloading
offloading weights is not available yet; --tensor-model-parallel-size divides them
    remote-device cpu-offloading-weights
curriculum learning and token dropping are not available; leave it out
    curriculum-learning curriculum-learning-legacy warmup-seq-length data-efficiency-curriculum-learning random-ltd
    train-data-exact-num-epochs
ModelOpt's quantization is not available in training; use tools/quantize.py or --quantization-aware-training
    export-*
it is another program's switch for distillation; name the teacher's checkpoint with --teacher-load
    kd load-teacher compression-training mos
sparse attention is not available: every query sees all keys, or a window; leave it out
    dsa-*
that part of multi-token prediction is not available; leave it out
    mtp-*
optimizer state goes to main memory with --optimizer-cpu-offload, a part of it with --optimizer-offload-fraction
    optimizer-offload
multi-modal positions are not available yet; use --position-embedding-type rope
    mrope-section
a model with layers of different sizes is not available yet; leave it out
    heterogeneous-layers-config-path heterogeneous-layers-config-encoded-json
writing BERT's embeddings is not available yet; leave it out
    output-bert-embeddings bert-embedder-type
a vision model alone is not trained here; pretrain_vlm.py trains one in front of a language model
    dino-* num-classes img-dim num-channels classes-fraction data-per-class-fraction head-lr-mult
    vision-pretraining vision-pretraining-type vision-backbone-type swin-backbone-type mask-type mask-factor
    iter-per-epoch
tools/preprocess_images.py writes turns, by a chat template or by texts around them; leave it out
    tokenizer-prompt-format
samples are packed with --packing best-fit, to --seq-length
    packing-seq-length packing-buffer-size dataloader-seq-length
tools/checkpoint/add_vision_encoder.py gives a new projector weights; leave it out
    allow-missing-vision-projection-checkpoint
that part of the generation engine is not available; leave it out
    inference-dynamic-batching-*
fp4 is not available yet; train with --fp8-format e4m3 --fp8-recipe mxfp8
    fp4-*
symmetric products of Muon's steps are computed whole; leave it out
    muon-use-syrk
retrieval models are not available: they are outside this project
    qa-data-dev qa-data-test faiss-use-gpu faiss-match faiss-topk-retrievals eval-micro-batch-size train-with-neg
    train-hard-neg val-av-rank-hard-neg val-av-rank-other-neg ict-head-size biencoder-projection-dim
    biencoder-shared-query-context-model ict-load bert-load titles-data-path query-in-block-prob use-one-sent-docs
    evidence-data-path retriever-seq-length retriever-report-topk-accuracies retriever-score-scaling block-data-path
    embedding-path indexer-batch-size indexer-log-interval retro-*
"""
