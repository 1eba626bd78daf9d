#!/usr/bin/env bash
# The 220 M model of the T5 paper, on the 8 GPUs of one node.
#
# Hardware  8 GPUs of 24 GB or more, bf16.
# Time      1 M steps of 512 samples are 2.2e20 FLOPs: 3.2 days at 8 x 100 TFLOP/s; not measured here.
# Memory    14.27 GB a GPU, of which 11.88 GB are activations, by --dry-run.
# Fewer     GPUS_PER_NODE=4: 14.60 GB; the batch stays the same, by accumulation.
#           GPUS_PER_NODE=1: 16.59 GB; 25 days.
# Data      DATA_PATH: prefix of a data set that tools/preprocess_data.py --split-sentences made; VOCAB_FILE: a vocab.txt.
# Paths     Megatron-LM's, all or none, before the flags: CHECKPOINT_PATH TENSORBOARD_LOGS_PATH VOCAB_FILE DATA_PATH;
#           or variables of these names.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
paths='CHECKPOINT_PATH TENSORBOARD_LOGS_PATH VOCAB_FILE DATA_PATH'
source examples/paths.sh
CHECKPOINT_PATH=${CHECKPOINT_PATH:-runs/t5_220m_distributed}

exec bash examples/launch.sh pretrain_t5.py @examples/t5/t5_220m_distributed.flags \
    --data-path ${DATA_PATH:-data/wikipedia_text_sentence} --vocab-file "${VOCAB_FILE:-data/bert/vocab.txt}" \
    --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" \
    --tensorboard-dir "${TENSORBOARD_LOGS_PATH:-$CHECKPOINT_PATH/tensorboard}" "$@"
