"""Flags of which the table's rows are made, under short names: models, and ways to divide work."""

from __future__ import annotations

SMALL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --init-method-std 0.2"
LLAMA_TIED = (
    f"{SMALL} --num-attention-heads 8 --group-query-attention --num-query-groups 4 --position-embedding-type rope "
    "--normalization RMSNorm --activation swiglu --disable-bias-linear"
)
LLAMA = f"{LLAMA_TIED} --untie-embeddings-and-output-weights"
LATENT_TIED = (
    f"{SMALL} --num-attention-heads 8 --position-embedding-type rope --normalization RMSNorm --activation swiglu "
    "--disable-bias-linear --multi-latent-attention --kv-lora-rank 10 --qk-head-dim 6 --qk-pos-emb-head-dim 4 "
    "--v-head-dim 5"
)
LATENT = f"{LATENT_TIED} --untie-embeddings-and-output-weights"
RELATIVE = (
    f"{SMALL} --position-embedding-type relative --normalization RMSNorm --disable-bias-linear --softmax-scale 1.0 "
    "--relative-attention-num-buckets 8 --relative-attention-max-distance 12"
)
LATER = "--mtp-num-layers 2 --mtp-loss-scaling-factor 0.7"
HYBRID = (
    "--hidden-size 32 --num-attention-heads 4 --init-method-std 0.2 --normalization RMSNorm --disable-bias-linear "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --num-experts 4 --moe-ffn-hidden-size 16 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1"
)
EXPERTS = "--num-experts 8 --moe-ffn-hidden-size 16"

TP2, TP3, TP4, TP8 = (f"--tensor-model-parallel-size {size}" for size in (2, 3, 4, 8))
SP = "--sequence-parallel"
CP2, CP4 = (f"--context-parallel-size {size}" for size in (2, 4))
PP2, PP3, PP4 = (f"--pipeline-model-parallel-size {size}" for size in (2, 3, 4))
LOOPED = f"{PP2} --num-virtual-stages-per-pipeline-rank 2"
ZB_H1 = "--pipeline-schedule zb-h1"
VEE = f"{PP2} --pipeline-schedule zb-v"
NO_OVERLAP = "--no-overlap-p2p-communication"
EP2, EP4 = (f"--expert-model-parallel-size {size}" for size in (2, 4))
ETP1, ETP2 = (f"--expert-tensor-parallel-size {size}" for size in (1, 2))
ZERO = "--use-distributed-optimizer"
ZERO_2 = "--data-parallel-sharding-strategy optim_grads"
ZERO_3 = "--data-parallel-sharding-strategy optim_grads_params"
ZERO_OVERLAPPED = f"{ZERO} --overlap-grad-reduce --overlap-param-gather"
FUSED = "--gradient-accumulation-fusion"
FULL, SELECTIVE = "--recompute-granularity full", "--recompute-granularity selective"
OFFLOADED = "--cpu-offloading --min-offloaded-tensor-size 1"
