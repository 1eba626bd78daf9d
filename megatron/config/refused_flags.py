"""Flags of Megatron-LM that stop the run, each with what to do instead, and values of them that are accepted."""

from __future__ import annotations

from megatron.config.renamed_flags import ZERO

# flags without dashes, and what to do instead
REFUSED: tuple[tuple[str, str], ...] = (
    (
        "init-method-xavier-uniform",
        "weights start from a normal distribution: --init-method-std 0.02",
    ),
    (
        "onnx-safe",
        "there is no ONNX export; leave it out",
    ),
    (
        "lazy-mpu-init",
        "ranks always meet at the start; leave it out",
    ),
    (
        "decrease-batch-size-if-needed",
        "give a --global-batch-size that divides; --dry-run says which do",
    ),
    (
        "disable-bf16-reduced-precision-matmul",
        "matmuls are accumulated as torch does by default; leave it out",
    ),
    (
        "adlr-autoresume adlr-autoresume-interval",
        "use --exit-signal-handler or --exit-duration-in-mins and start the job again",
    ),
    (
        "yaml-cfg",
        "give --config FILE; settings are named like flags, flat or nested by group",
    ),
    (
        "no-data-sharding",
        "shuffling by --dataloader-type cyclic is always over the whole data set; leave it out",
    ),
    (
        "sample-rate",
        "every sample is used; make a smaller data set or give --train-samples",
    ),
    (
        "bert-binary-head bert-no-binary-head",
        "it belongs to BERT; train one with pretrain_bert.py",
    ),
    (
        "mask-prob short-seq-prob",
        "it belongs to BERT (pretrain_bert.py) and T5 (pretrain_t5.py)",
    ),
    (
        "decoder-num-layers",
        "it belongs to T5 (pretrain_t5.py); for other models say --num-layers",
    ),
    (
        "decoder-seq-length",
        "it belongs to T5 (pretrain_t5.py); for other models say --seq-length",
    ),
    (
        "relative-attention-num-buckets relative-attention-max-distance",
        "it belongs to T5; train one with pretrain_t5.py",
    ),
    (
        "data-impl",
        "data is read from PREFIX.bin and PREFIX.idx, as tools/preprocess_data.py writes them",
    ),
    (
        "ddp-num-buckets",
        "say how large a bucket is: --ddp-bucket-size",
    ),
    (
        "decoupled-lr",
        "one learning rate holds for all parameters: --lr",
    ),
    (
        "decoupled-min-lr",
        "one learning rate holds for all parameters: --min-lr",
    ),
    (
        "use-torch-fsdp2 use-custom-fsdp use-megatron-fsdp keep-fp8-transpose-cache-when-using-custom-fsdp "
        "keep-fp8-transpose-cache",
        ZERO,
    ),
    (
        "num-distributed-optimizer-instances",
        "optimizer state is sharded over all data-parallel ranks; leave it out",
    ),
    (
        "iterations-to-skip",
        "no iteration can be left out yet; leave it out",
    ),
    (
        "error-injection-rate error-injection-type",
        "there is no rerun engine to test; leave it out",
    ),
    (
        "result-rejected-tracker-filename",
        "there is no rerun engine; leave it out",
    ),
    (
        "check-for-spiky-loss",
        "only non-finite losses stop a run; leave it out",
    ),
    (
        "check-for-large-grads",
        "only non-finite gradients stop a run; --clip-grad bounds their norm",
    ),
    (
        "log-energy",
        "energy is not measured; leave it out",
    ),
    (
        "test-mode",
        "leave it out: tests use --mock-data",
    ),
    (
        "ckpt-convert-format ckpt-convert-save ckpt-convert-update-legacy-dist-opt-format",
        "checkpoints are converted by a command of their own, tools/checkpoint/convert.py",
    ),
    (
        "dist-ckpt-format",
        "only torch_dist is written; leave it out",
    ),
    (
        "spec",
        "layers are chosen by model flags, not by code named on the command line; leave it out",
    ),
    (
        "use-workload-inspector-server run-workload-inspector-server",
        "there is no workload inspector; leave it out",
    ),
    (
        "pipeline-model-parallel-split-rank",
        "encoder and decoder are one chain of layers; divide it with --pipeline-model-parallel-layout",
    ),
    (
        "data-parallel-size",
        "data parallelism takes the ranks that the other sizes leave: start more ranks; for --dry-run say --world-size",
    ),
    (
        "encoder-tensor-model-parallel-size",
        "one --tensor-model-parallel-size holds for all layers",
    ),
    (
        "encoder-pipeline-model-parallel-size",
        "one --pipeline-model-parallel-size holds for all layers",
    ),
)

# values that ask for what happens anyway, taken without a word
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
    "--profile-ranks": ("0",),
    "--replication-factor": ("2",),
}
