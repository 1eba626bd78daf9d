#!/usr/bin/env bash
# A model of GPT-3 XL's size, 1.3 B parameters, a million tokens a step, 20 tokens a parameter.
#
# Hardware  8 GPUs of 40 GB or more on one node.
# Layout    8 data-parallel replicas, optimizer state sharded over them: the model fits, so nothing is split.
# Memory    23.49 GB, of which 12.94 GB are activations.
# Time      2.2e20 FLOPs: 2.1 days at 8 x 150 TFLOP/s, an assumption (half of an A100's peak).
# Fewer     GPUS_PER_NODE=4: 25.46 GB; the batch stays the same, by accumulation.
#           GPUS_PER_NODE=1 --micro-batch-size 2: 30.80 GB; 17 days.
# Data      DATA_PATH: prefix of a data set that tools/preprocess_data.py made.
# Paths     Megatron-LM's, all or none, before the flags, or variables of these names:
#           CHECKPOINT_PATH TENSORBOARD_LOGS_PATH VOCAB_FILE MERGE_FILE DATA_PATH
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
paths='CHECKPOINT_PATH TENSORBOARD_LOGS_PATH VOCAB_FILE MERGE_FILE DATA_PATH'
source examples/paths.sh
CHECKPOINT_PATH=${CHECKPOINT_PATH:-runs/gpt_1.3b}

exec bash examples/launch.sh pretrain_gpt.py @examples/gpt3/gpt_1.3b.flags \
    --data-path ${DATA_PATH:-data/openwebtext_text_document} \
    --vocab-file "${VOCAB_FILE:-data/gpt2/vocab.json}" --merge-file "${MERGE_FILE:-data/gpt2/merges.txt}" \
    --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" \
    --tensorboard-dir "${TENSORBOARD_LOGS_PATH:-$CHECKPOINT_PATH/tensorboard}" "$@"
