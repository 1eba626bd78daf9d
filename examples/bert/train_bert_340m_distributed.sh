#!/usr/bin/env bash
# The 340 M model of the BERT paper, on the 8 GPUs of one node.
#
# Hardware  8 GPUs of 24 GB or more, bf16.
# Time      1 M steps of 256 samples are 2.6e20 FLOPs: 3.8 days at 8 x 100 TFLOP/s; not measured here.
# Memory    17.36 GB a GPU, of which 13.87 GB are activations, by --dry-run.
# Fewer     GPUS_PER_NODE=4: 17.87 GB; the batch stays the same, by accumulation.
#           GPUS_PER_NODE=1: 20.89 GB; 30 days.
# Data      DATA_PATH: prefix of a data set that tools/preprocess_data.py --split-sentences made; VOCAB_FILE: a vocab.txt.
# Paths     Megatron-LM's, all or none, before the flags: CHECKPOINT_PATH TENSORBOARD_LOGS_PATH VOCAB_FILE DATA_PATH;
#           or variables of these names.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
paths='CHECKPOINT_PATH TENSORBOARD_LOGS_PATH VOCAB_FILE DATA_PATH'
source examples/paths.sh
CHECKPOINT_PATH=${CHECKPOINT_PATH:-runs/bert_340m_distributed}

exec bash examples/launch.sh pretrain_bert.py @examples/bert/bert_340m_distributed.flags \
    --data-path ${DATA_PATH:-data/wikipedia_text_sentence} --vocab-file "${VOCAB_FILE:-data/bert/vocab.txt}" \
    --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" \
    --tensorboard-dir "${TENSORBOARD_LOGS_PATH:-$CHECKPOINT_PATH/tensorboard}" "$@"
