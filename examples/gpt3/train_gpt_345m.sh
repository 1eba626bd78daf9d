#!/usr/bin/env bash
# The 345 M model that Megatron-LM's first examples trained, on one GPU.
#
# Hardware  1 GPU of 16 GB or more, fp16.
# Layout    none: everything on the one GPU.
# Memory    10.35 GB, of which 3.44 GB are activations.
# Time      9.3e18 FLOPs: 1.1 days at 1 x 100 TFLOP/s, an assumption.
# Smaller   GPUS_PER_NODE=1 --micro-batch-size 1: 7.66 GB; for a GPU of 12 GB.
# Loss      about 3.0 by the scaling law of arXiv:2203.15556 (model and tokens of this size); not measured here.
# Data      DATA_PATH: prefix of a data set that tools/preprocess_data.py made.
# Paths     Megatron-LM's, all or none, before the flags, or variables of these names:
#           CHECKPOINT_PATH TENSORBOARD_LOGS_PATH VOCAB_FILE MERGE_FILE DATA_PATH
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
paths='CHECKPOINT_PATH TENSORBOARD_LOGS_PATH VOCAB_FILE MERGE_FILE DATA_PATH'
source examples/paths.sh
CHECKPOINT_PATH=${CHECKPOINT_PATH:-runs/gpt_345m}

export GPUS_PER_NODE="${GPUS_PER_NODE:-1}"
exec bash examples/launch.sh pretrain_gpt.py @examples/gpt3/gpt_345m.flags \
    --data-path ${DATA_PATH:-data/openwebtext_text_document} \
    --vocab-file "${VOCAB_FILE:-data/gpt2/vocab.json}" --merge-file "${MERGE_FILE:-data/gpt2/merges.txt}" \
    --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" \
    --tensorboard-dir "${TENSORBOARD_LOGS_PATH:-$CHECKPOINT_PATH/tensorboard}" "$@"
