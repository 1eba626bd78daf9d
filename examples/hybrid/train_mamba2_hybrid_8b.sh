#!/usr/bin/env bash
# Mamba-2-Hybrid 8B (arXiv:2406.07887): 24 Mamba-2, 4 attention and 28 MLP layers.
#
# Hardware  16 GPUs of 80 GB, 2 nodes of 8; start it on each, see examples/launch.sh, or with examples/slurm.
# Layout    heads and groups of each layer over 4 GPUs (tensor and sequence parallelism), and 4 replicas.
# Memory    47.35 GB on a GPU, of which 26.00 GB are activations.
# Time      1.4e22 FLOPs: 25.2 days at 16 x 400 TFLOP/s, a good speed of an H100.
# Fewer     NODES=1 GPUS_PER_NODE=4 --micro-batch-size 1: 46.44 GB; four times as long.
# Data      DATA_PATH: prefix of a data set that tools/preprocess_data.py made; TOKENIZER_MODEL: file of a SentencePiece model.
# Paths     Megatron-LM's, all or none, before the flags, or variables of these names:
#           CHECKPOINT_PATH TENSORBOARD_LOGS_PATH TOKENIZER_MODEL DATA_PATH
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
paths='CHECKPOINT_PATH TENSORBOARD_LOGS_PATH TOKENIZER_MODEL DATA_PATH'
source examples/paths.sh
CHECKPOINT_PATH=${CHECKPOINT_PATH:-runs/mamba2_hybrid_8b}
export NODES=${NODES:-2}

exec bash examples/launch.sh pretrain_hybrid.py @examples/hybrid/mamba2_hybrid_8b.flags \
    --data-path ${DATA_PATH:-data/fineweb_text_document} --tokenizer-model "${TOKENIZER_MODEL:-data/tokenizer.model}" \
    --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" \
    --tensorboard-dir "${TENSORBOARD_LOGS_PATH:-$CHECKPOINT_PATH/tensorboard}" "$@"
