"""Megatron-LM's flags of features that do not exist here, by feature, each with what to do instead.

When a feature lands, its flags become fields of a group and its entry here is deleted.
"""

from __future__ import annotations

from megatron.config.recent_flags import RECENT_FAMILIES
from megatron.config.renamed_flags import ZERO

# feature, advice, and its flags without dashes
UNAVAILABLE: tuple[tuple[str, str, str], ...] = (
    (
        "mixture of experts is",
        " yet; leave it out for a dense model",
        "expert-model-parallel-size expert-tensor-parallel-size num-experts moe-layer-freq moe-ffn-hidden-size "
        "moe-shared-expert-intermediate-size moe-shared-expert-overlap moe-grouped-gemm "
        "moe-use-legacy-grouped-gemm moe-layer-recompute moe-extended-tp moe-use-upcycling "
        "moe-router-load-balancing-type moe-router-dtype moe-router-score-function moe-router-topk "
        "moe-router-pre-softmax moe-router-num-groups moe-router-group-topk moe-router-topk-scaling-factor "
        "moe-router-enable-expert-bias moe-router-bias-update-rate moe-aux-loss-coeff moe-z-loss-coeff "
        "moe-input-jitter-eps moe-per-layer-logging moe-token-dispatcher-type moe-enable-deepep "
        "moe-permute-fusion moe-expert-capacity-factor moe-pad-expert-input-to-capacity moe-token-drop-policy",
    ),
    (
        "multi-latent attention is",
        " yet; --group-query-attention reduces the size of keys and values",
        "multi-latent-attention q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim "
        "rotary-scaling-factor mscale mscale-all-dim",
    ),
    (
        "multi-token prediction is",
        " yet; leave it out",
        "mtp-num-layers mtp-loss-scaling-factor",
    ),
    (
        "fp8 is",
        " yet; train with --bf16",
        "fp8-format fp8-recipe fp8-margin fp8-interval fp8-amax-history-len fp8-amax-compute-algo no-fp8-wgrad "
        "fp8-param-gather first-last-layers-bf16 num-layers-at-start-in-bf16 num-layers-at-end-in-bf16",
    ),
    (
        "an optimizer with reduced precision or on the CPU is",
        " yet; --use-distributed-optimizer shards its state over data-parallel ranks",
        "use-precision-aware-optimizer main-grads-dtype main-params-dtype exp-avg-dtype exp-avg-sq-dtype "
        "optimizer-cpu-offload optimizer-offload-fraction use-torch-optimizer-for-cpu-offload "
        "overlap-cpu-optimizer-d2h-h2d no-pin-cpu-grads no-pin-cpu-params",
    ),
    (
        "CUDA graphs are",
        " yet; leave it out",
        "enable-cuda-graph cuda-graph-warmup-steps external-cuda-graph cuda-graph-scope cuda-graph-impl",
    ),
    (
        "a non-persistent checkpoint is",
        " yet; use --save and --save-interval",
        "non-persistent-save-interval non-persistent-ckpt-type non-persistent-global-ckpt-dir "
        "non-persistent-local-ckpt-dir non-persistent-local-ckpt-algo replication replication-jump "
        "replication-factor",
    ),
    (
        "multi-modal positions are",
        " yet; use --position-embedding-type rope",
        "mrope-section",
    ),
    (
        "Mamba and hybrid models are",
        " yet; leave it out for a transformer",
        "hybrid-attention-ratio hybrid-mlp-ratio hybrid-override-pattern hybrid-layer-pattern mamba-state-dim "
        "mamba-head-dim mamba-num-groups is-hybrid-model",
    ),
    (
        "a model with layers of different sizes is",
        " yet; leave it out",
        "heterogeneous-layers-config-path heterogeneous-layers-config-encoded-json",
    ),
    (
        "writing BERT's embeddings is",
        " yet; leave it out",
        "output-bert-embeddings bert-embedder-type",
    ),
    (
        "a task of retrieval is",
        ": retrieval models are outside this project",
        "qa-data-dev qa-data-test faiss-use-gpu faiss-match faiss-topk-retrievals eval-micro-batch-size train-with-neg "
        "train-hard-neg val-av-rank-hard-neg val-av-rank-other-neg",
    ),
    (
        "a biencoder is",
        ": retrieval models are outside this project",
        "ict-head-size biencoder-projection-dim biencoder-shared-query-context-model ict-load bert-load "
        "titles-data-path query-in-block-prob use-one-sent-docs evidence-data-path retriever-seq-length "
        "retriever-report-topk-accuracies retriever-score-scaling block-data-path embedding-path "
        "indexer-batch-size indexer-log-interval",
    ),
    (
        "RETRO is",
        ": retrieval models are outside this project",
        "retro-project-dir retro-add-retriever retro-cyclic-train-iters retro-encoder-layers "
        "retro-encoder-hidden-dropout retro-encoder-attention-dropout retro-num-neighbors "
        "retro-num-retrieved-chunks retro-attention-gate retro-no-verify-neighbor-count",
    ),
    (
        "a vision model is",
        ": only language models are trained here",
        "num-classes img-h img-w img-dim num-channels patch-dim classes-fraction data-per-class-fraction "
        "head-lr-mult vision-pretraining vision-pretraining-type vision-backbone-type swin-backbone-type "
        "mask-type mask-factor iter-per-epoch dino-local-img-size dino-local-crops-number dino-head-hidden-size "
        "dino-bottleneck-size dino-freeze-last-layer dino-norm-last-layer dino-warmup-teacher-temp "
        "dino-teacher-temp dino-warmup-teacher-temp-epochs",
    ),
    (
        "reinforcement learning is",
        ": this project pretrains; leave it out",
        "grpo-group-size grpo-clamp-eps-lower grpo-clamp-eps-upper grpo-prompts-per-step grpo-kl-beta "
        "grpo-iterations langrl-env-config",
    ),
    (
        "straggler detection is",
        " yet; --timing-log-level 1 --timing-log-option all shows the times of every rank",
        "log-straggler disable-straggler-on-startup straggler-ctrlr-port straggler-minmax-count",
    ),
    (
        "NVIDIA's fault-tolerance package is",
        ": torchrun or Slurm restarts ranks, and --load resumes the run",
        "enable-ft-package calc-ft-timeouts",
    ),
    (
        "the batching inference engine is",
        " yet; leave it out",
        "inference-dynamic-batching inference-dynamic-batching-buffer-size-gb "
        "inference-dynamic-batching-buffer-guaranteed-fraction inference-dynamic-batching-buffer-overflow-factor "
        "inference-dynamic-batching-max-requests-override inference-dynamic-batching-max-tokens-override "
        "inference-dynamic-batching-max-requests",
    ),
)

# prefixes of flags, known by name or not, and what to do instead
FAMILIES: dict[str, str] = {
    "--moe-": "mixture of experts is not available yet; leave it out for a dense model",
    "--mtp-": "multi-token prediction is not available yet; leave it out",
    "--fp8-": "fp8 is not available yet; train with --bf16",
    "--fp4-": "fp4 is not available yet; train with --bf16",
    "--mamba-": "Mamba and hybrid models are not available yet; leave it out for a transformer",
    "--hybrid-": "Mamba and hybrid models are not available yet; leave it out for a transformer",
    "--cuda-graph-": "CUDA graphs are not available yet; leave it out",
    "--inference-dynamic-batching-": "the batching inference engine is not available yet; leave it out",
    "--retro-": "RETRO is not available: retrieval models are outside this project",
    "--dino-": "a vision model is not available: only language models are trained here",
    "--grpo-": "reinforcement learning is not available: this project pretrains; leave it out",
    "--langrl-": "reinforcement learning is not available: this project pretrains; leave it out",
    "--rl-": "reinforcement learning is not available: this project pretrains; leave it out",
    "--fsdp-": ZERO,
    **RECENT_FAMILIES,
}
