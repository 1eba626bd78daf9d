#!/usr/bin/env bash
# GPT-2 small, 124 M parameters, half a million tokens a step.
#
# Hardware  8 GPUs of 24 GB or more.
# Layout    8 data-parallel replicas, optimizer state sharded over them.
# Memory    5.10 GB, of which 3.65 GB are activations.
# Time      2.4e20 FLOPs: 1.7 days at 8 x 200 TFLOP/s, an assumption.
# Fewer     GPUS_PER_NODE=1: 6.41 GB; the batch stays the same, by accumulation.
# Loss      published runs of this model on OpenWebText reach a validation loss of about 2.85; not repeated here.
# Data      DATA_PATH: prefix of a data set that tools/preprocess_data.py made.
# Paths     Megatron-LM's, all or none, before the flags, or variables of these names:
#           CHECKPOINT_PATH TENSORBOARD_LOGS_PATH VOCAB_FILE MERGE_FILE DATA_PATH
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
paths='CHECKPOINT_PATH TENSORBOARD_LOGS_PATH VOCAB_FILE MERGE_FILE DATA_PATH'
source examples/paths.sh
CHECKPOINT_PATH=${CHECKPOINT_PATH:-runs/gpt2_124m}

exec bash examples/launch.sh pretrain_gpt.py @examples/gpt3/gpt2_124m.flags \
    --data-path ${DATA_PATH:-data/openwebtext_text_document} \
    --vocab-file "${VOCAB_FILE:-data/gpt2/vocab.json}" --merge-file "${MERGE_FILE:-data/gpt2/merges.txt}" \
    --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" \
    --tensorboard-dir "${TENSORBOARD_LOGS_PATH:-$CHECKPOINT_PATH/tensorboard}" "$@"
