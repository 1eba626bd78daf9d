#!/usr/bin/env bash
# A model of Llama 3's 8 B architecture, from scratch, at a sequence of 8,192 tokens.
#
# Hardware  8 GPUs of 80 GB on one node.
# Layout    every layer and the sequence split over 2, optimizer state sharded over the 4 replicas.
# Memory    56.85 GB, of which 19.65 GB are activations.
# Time      1.0e21 FLOPs: 3.7 days at 8 x 400 TFLOP/s, an assumption (four tenths of an H100's peak).
# Fewer     GPUS_PER_NODE=4 --tensor-model-parallel-size 4: 46.77 GB; twice the time.
# Loss      about 2.4 after 20 B tokens by the scaling law of arXiv:2203.15556; not measured here.
# Data      DATA_PATH: prefix of a data set that tools/preprocess_data.py made; TOKENIZER_MODEL: folder of tokenizer.json.
# Paths     Megatron-LM's, all or none, before the flags, or variables of these names:
#           CHECKPOINT_PATH TENSORBOARD_LOGS_PATH TOKENIZER_MODEL DATA_PATH
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
paths='CHECKPOINT_PATH TENSORBOARD_LOGS_PATH TOKENIZER_MODEL DATA_PATH'
source examples/paths.sh
CHECKPOINT_PATH=${CHECKPOINT_PATH:-runs/llama3_8b}

exec bash examples/launch.sh pretrain_gpt.py @examples/llama/llama3_8b.flags \
    --data-path ${DATA_PATH:-data/fineweb_text_document} --tokenizer-model "${TOKENIZER_MODEL:-data/llama3}" \
    --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" \
    --tensorboard-dir "${TENSORBOARD_LOGS_PATH:-$CHECKPOINT_PATH/tensorboard}" "$@"
