#!/usr/bin/env bash
# A model of Nemotron-H-8B's architecture, from scratch: 24 Mamba-2, 4 attention and 24 MLP layers.
#
# Hardware  32 GPUs of 80 GB, 4 nodes of 8; start it on each, see examples/launch.sh, or with examples/slurm.
# Layout    heads and groups of each layer over 4 GPUs (tensor and sequence parallelism), and 8 replicas.
# Memory    29.42 GB on a GPU, of which 13.34 GB are activations.
# Time      9.3e20 FLOPs: 0.8 days at 32 x 400 TFLOP/s, a good speed of an H100.
# Fewer     NODES=1: 38.53 GB; four times as long.
# Data      DATA_PATH: prefix of a data set that tools/preprocess_data.py made; TOKENIZER_MODEL: folder of tokenizer.json.
# Paths     Megatron-LM's, all or none, before the flags, or variables of these names:
#           CHECKPOINT_PATH TENSORBOARD_LOGS_PATH TOKENIZER_MODEL DATA_PATH
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
paths='CHECKPOINT_PATH TENSORBOARD_LOGS_PATH TOKENIZER_MODEL DATA_PATH'
source examples/paths.sh
CHECKPOINT_PATH=${CHECKPOINT_PATH:-runs/nemotron_h_8b}
export NODES=${NODES:-4}

exec bash examples/launch.sh pretrain_hybrid.py @examples/hybrid/nemotron_h_8b.flags \
    --data-path ${DATA_PATH:-data/fineweb_text_document} --tokenizer-model "${TOKENIZER_MODEL:-data/nemotron_h}" \
    --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" \
    --tensorboard-dir "${TENSORBOARD_LOGS_PATH:-$CHECKPOINT_PATH/tensorboard}" "$@"
