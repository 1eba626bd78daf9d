#!/usr/bin/env bash
# Megatron-LM's small hybrid: 20 Mamba-2, 4 attention and 24 MLP layers; 0.9 B with its large vocabulary.
#
# Hardware  8 GPUs of 40 GB or more, one node.
# Layout    8 replicas, whose optimizer states are sharded.
# Memory    34.02 GB on a GPU, of which 25.12 GB are activations.
# Time      1.2e21 FLOPs: 4.4 days at 8 x 400 TFLOP/s, a good speed of an H100.
# Fewer     GPUS_PER_NODE=1 --micro-batch-size 1: 23.55 GB; eight times as long.
# Data      DATA_PATH: prefix of a data set that tools/preprocess_data.py made; TOKENIZER_MODEL: file of a SentencePiece model.
# Paths     Megatron-LM's, all or none, before the flags, or variables of these names:
#           CHECKPOINT_PATH TENSORBOARD_LOGS_PATH TOKENIZER_MODEL DATA_PATH
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
paths='CHECKPOINT_PATH TENSORBOARD_LOGS_PATH TOKENIZER_MODEL DATA_PATH'
source examples/paths.sh
CHECKPOINT_PATH=${CHECKPOINT_PATH:-runs/mamba2_hybrid_800m}
export NODES=${NODES:-1}

exec bash examples/launch.sh pretrain_hybrid.py @examples/hybrid/mamba2_hybrid_800m.flags \
    --data-path ${DATA_PATH:-data/fineweb_text_document} --tokenizer-model "${TOKENIZER_MODEL:-data/tokenizer.model}" \
    --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" \
    --tensorboard-dir "${TENSORBOARD_LOGS_PATH:-$CHECKPOINT_PATH/tensorboard}" "$@"
