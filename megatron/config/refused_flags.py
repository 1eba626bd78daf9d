"""Flags of Megatron-LM that stop the run, each with what to do instead, and values of them that are accepted."""

from __future__ import annotations

from megatron.config.renamed_flags import ZERO

# flags without dashes, and what to do instead
REFUSED: tuple[tuple[str, str], ...] = (
    (
        "init-method-xavier-uniform",
        "weights are initialized from a normal distribution; --init-method-std sets its standard deviation",
    ),
    (
        "onnx-safe",
        "there is no ONNX export; leave it out",
    ),
    (
        "lazy-mpu-init",
        "process groups are always initialized at startup; leave it out",
    ),
    (
        "decrease-batch-size-if-needed",
        "give a --global-batch-size that is divisible; the error message lists sizes that fit",
    ),
    (
        "disable-bf16-reduced-precision-matmul",
        "matmuls use torch's default accumulation; leave it out",
    ),
    (
        "adlr-autoresume adlr-autoresume-interval",
        "use --exit-signal-handler or --exit-duration-in-mins, and restart the job",
    ),
    (
        "yaml-cfg",
        "give --config FILE; settings are named like flags, flat or nested by group",
    ),
    (
        "no-data-sharding",
        "--dataloader-type cyclic always shuffles the whole data set; leave it out",
    ),
    (
        "sample-rate",
        "every sample is used; make a smaller data set, or give --train-samples",
    ),
    (
        "bert-binary-head bert-no-binary-head",
        "only BERT has it; train one with pretrain_bert.py",
    ),
    (
        "mask-prob short-seq-prob",
        "only BERT (pretrain_bert.py) and T5 (pretrain_t5.py) have it",
    ),
    (
        "decoder-num-layers",
        "only T5 has it (pretrain_t5.py); other models take --num-layers",
    ),
    (
        "decoder-seq-length",
        "only T5 has it (pretrain_t5.py); other models take --seq-length",
    ),
    (
        "relative-attention-num-buckets relative-attention-max-distance",
        "only T5 has it; train one with pretrain_t5.py",
    ),
    (
        "data-impl",
        "only memory-mapped data (PREFIX.bin and PREFIX.idx, written by tools/preprocess_data.py) is read",
    ),
    (
        "ddp-num-buckets",
        "give the size of a bucket instead: --ddp-bucket-size",
    ),
    (
        "decoupled-lr",
        "several learning rates are not available yet; --lr holds for all parameters",
    ),
    (
        "decoupled-min-lr",
        "several learning rates are not available yet; --min-lr holds for all parameters",
    ),
    (
        "use-torch-fsdp2 use-custom-fsdp use-megatron-fsdp keep-fp8-transpose-cache-when-using-custom-fsdp "
        "keep-fp8-transpose-cache",
        ZERO,
    ),
    (
        "num-distributed-optimizer-instances",
        "optimizer state is always sharded over all data-parallel ranks; leave it out",
    ),
    (
        "iterations-to-skip",
        "skipping iterations is not available yet; leave it out",
    ),
    (
        "error-injection-rate error-injection-type",
        "there is no rerun engine; leave it out",
    ),
    (
        "result-rejected-tracker-filename",
        "there is no rerun engine; leave it out",
    ),
    (
        "check-for-spiky-loss",
        "only a loss that is not finite stops a run; leave it out",
    ),
    (
        "check-for-large-grads",
        "only gradients that are not finite stop a run; --clip-grad limits their norm",
    ),
    (
        "log-energy",
        "energy is not measured; leave it out",
    ),
    (
        "test-mode",
        "there is no test mode; leave it out, or use --mock-data",
    ),
    (
        "ckpt-convert-format ckpt-convert-save ckpt-convert-update-legacy-dist-opt-format",
        "convert checkpoints with tools/checkpoint/convert.py",
    ),
    (
        "dist-ckpt-format",
        "only torch_dist is written; leave it out",
    ),
    (
        "spec",
        "layers are chosen by model flags, not by a Python object; leave it out",
    ),
    (
        "use-workload-inspector-server run-workload-inspector-server",
        "there is no workload inspector; leave it out",
    ),
    (
        "pipeline-model-parallel-split-rank",
        "encoder and decoder layers form one pipeline; --pipeline-model-parallel-layout divides it",
    ),
    (
        "data-parallel-size",
        "the data-parallel size is the number of ranks divided by the other sizes: start more ranks (with --dry-run: "
        "--world-size)",
    ),
    (
        "encoder-tensor-model-parallel-size",
        "encoder and decoder share --tensor-model-parallel-size; leave it out",
    ),
    (
        "encoder-pipeline-model-parallel-size",
        "encoder and decoder share --pipeline-model-parallel-size; leave it out",
    ),
)

# values that ask for what happens anyway, accepted without a remark
HARMLESS: dict[str, tuple[str, ...]] = {
    "--transformer-impl": ("local",),
    "--DDP-impl": ("local",),
    "--cross-entropy-fusion-impl": ("native",),
    "--dist-ckpt-strictness": ("raise_all",),
    "--rerun-mode": ("disabled",),
    "--tp-comm-bootstrap-backend": ("nccl",),
    "--wgrad-deferral-limit": ("0",),
    "--num-dataset-builder-threads": ("1",),
    "--ckpt-format": ("torch_dist",),
    "--data-impl": ("mmap", "infer"),
    "--sample-rate": ("1.0", "1"),
    "--dist-ckpt-format": ("torch_dist",),
    "--num-distributed-optimizer-instances": ("1",),
    "--ds-sequence-parallel-size": ("1",),
    "--remote-device": ("none",),
    "--softmax-type": ("vanilla",),
    "--rope-type": ("rope",),
    "--glu-linear-offset": ("0", "0.0"),
    "--most-recent-k": ("-1",),
    "--exit-signal": ("SIGTERM",),
    "--mlp-type": ("standard",),
    "--extra-vocab-size": ("0",),
    "--stage": ("pt",),
    "--train-mode": ("pretrain",),
    "--tile-factor": ("1",),
    "--error-injection-rate": ("0",),
    "--encoder-tensor-model-parallel-size": ("0",),
    "--encoder-pipeline-model-parallel-size": ("0",),
    "--num-experts": ("0", "1"),
    "--expert-model-parallel-size": ("1",),
    "--expert-tensor-parallel-size": ("1",),
    "--moe-layer-freq": ("1",),
    "--mtp-num-layers": ("0",),
    "--cuda-graph-impl": ("none",),
    "--main-grads-dtype": ("fp32",),
    "--main-params-dtype": ("fp32",),
    "--exp-avg-dtype": ("fp32",),
    "--exp-avg-sq-dtype": ("fp32",),
    "--replication-factor": ("2",),
}
