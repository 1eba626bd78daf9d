"""What other training programs (transformers, torchtitan, nanoGPT, litgpt) call settings, and the flag here."""

from __future__ import annotations

from megatron.config.suggestions import parts_of

_SAME = """
    --hidden-size: hidden-dim d-model dim n-embd emb-dim embed-dim embedding-dim model-dim
    --num-layers: n-layer n-layers layers num-hidden-layers depth
    --num-attention-heads: n-head n-heads heads num-heads
    --num-query-groups: n-kv-heads num-kv-heads n-query-groups
    --ffn-hidden-size: intermediate-size ffn-dim d-ff ffn-hidden-dim
    --kv-channels: head-dim head-size
    --seq-length: seq-len sequence-length seqlen max-seq-len max-seq-length block-size context-length max-length
    --norm-epsilon: norm-eps rms-norm-eps layer-norm-eps layer-norm-epsilon
    --train-iters: max-iters max-steps num-steps steps train-steps total-steps num-train-steps training-steps iters
    --lr-decay-style: lr-scheduler-type lr-scheduler lr-schedule
    --lr-warmup-iters: warmup-steps warmup-iters num-warmup-steps lr-warmup-steps
    --lr-warmup-fraction: warmup-ratio
    --micro-batch-size: per-device-train-batch-size per-device-batch-size device-batch-size local-batch-size mbs
    --global-batch-size: gbs total-batch-size train-batch-size
    --clip-grad: max-grad-norm grad-clip gradient-clip max-norm grad-norm-clip
    --adam-beta1: beta1
    --adam-beta2: beta2
    --adam-eps: eps epsilon adam-epsilon
    --weight-decay: wd
    --tensor-model-parallel-size: tp tp-size tensor-parallel tensor-parallel-degree
    --pipeline-model-parallel-size: pp pp-size pipeline-parallel pipeline-parallel-degree
    --context-parallel-size: cp cp-size context-parallel-degree
    --expert-model-parallel-size: ep ep-size expert-parallel-degree
    --save: output-dir out-dir save-dir ckpt-dir checkpoint-dir dump-folder
    --save-interval: save-steps save-every checkpoint-interval
    --log-interval: logging-steps log-freq log-every
    --eval-interval: eval-steps eval-every
    --load-hf: model-name-or-path hf-checkpoint pretrained-model base-model
    --tokenizer-model: tokenizer tokenizer-name
    --data-path: train-file data-dir data-prefix
    --recompute-granularity: gradient-checkpointing activation-checkpointing
    --attention-backend: attn-implementation flash-attention use-flash-attention
    --wandb-exp-name: run-name
    --num-experts: n-experts n-routed-experts
    --moe-router-topk: num-experts-per-tok
"""
_TYPE = "--bf16 and --fp16 choose the type of weights; they are fp32 without one"
_LENGTH = "the length of a run is --train-iters or --train-samples, which repeat the data as needed"
_ADVICE = {
    "epochs num-epochs num-train-epochs n-epochs max-epochs epoch": _LENGTH,
    "device cuda gpu": "a run uses the GPUs that it sees, and the CPU without one; CUDA_VISIBLE_DEVICES chooses them",
    "dtype torch-dtype precision mixed-precision": _TYPE,
    "gradient-accumulation-steps grad-accum grad-accum-steps accumulation-steps": (
        "gradients of --global-batch-size / (--micro-batch-size x data-parallel ranks) microbatches are accumulated"
    ),
    "dropout": "give --hidden-dropout and --attention-dropout",
    "tie-word-embeddings tie-embeddings": "embeddings are tied unless --untie-embeddings-and-output-weights is given",
    "dp dp-size data-parallel": "the data-parallel size is the number of ranks divided by the other sizes",
}
ADVICE = {parts_of(name): advice for names, advice in _ADVICE.items() for name in names.split()}
"""Advice for flags that no single flag here replaces, by the parts of the flag's name."""
SAME = {
    parts_of(name): flag
    for flag, _, names in (line.strip().partition(": ") for line in _SAME.strip().splitlines())
    for name in names.split()
}
"""The flag that means the same here, by the parts of the other flag's name."""
