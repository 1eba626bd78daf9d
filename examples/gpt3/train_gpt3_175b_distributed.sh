#!/usr/bin/env bash
# A model of GPT-3's 175 B architecture, 300 B tokens.
#
# Hardware  1024 GPUs of 80 GB, 128 nodes of 8; start it on each, see examples/launch.sh, or with examples/slurm.
# Layout    layers and sequences split over the 8 GPUs of a node, 96 layers over 8 pipeline ranks in 3 chunks each,
#           as in arXiv:2205.05198; 16 replicas share the optimizer state. At the full batch ranks wait for 2.4 % of
#           the time they compute, more while the batch is still small.
# Memory    31.63 GB on the fullest GPU, of which 12.51 GB are activations; none is computed twice.
# Time      3.2e23 FLOPs: 25.7 days at 1024 x 140 TFLOP/s, which arXiv:2104.04473 reports for A100s; its 34 days
#           count layers that are computed twice, too.
# Fewer     NODES=48 --pipeline-model-parallel-size 12: 31.44 GB; 12 pipeline ranks of 2 chunks on 384 GPUs.
#           NODES=16: 46.45 GB; eight times as long.
#           NODES=8 --recompute-granularity full --recompute-method uniform: 51.77 GB; all layers computed twice.
# Data      DATA_PATH: prefix of a data set that tools/preprocess_data.py made.
# Paths     Megatron-LM's, all or none, before the flags, or variables of these names:
#           CHECKPOINT_PATH TENSORBOARD_LOGS_PATH VOCAB_FILE MERGE_FILE DATA_PATH
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
paths='CHECKPOINT_PATH TENSORBOARD_LOGS_PATH VOCAB_FILE MERGE_FILE DATA_PATH'
source examples/paths.sh
CHECKPOINT_PATH=${CHECKPOINT_PATH:-runs/gpt3_175b_distributed}

export NODES="${NODES:-128}"
exec bash examples/launch.sh pretrain_gpt.py @examples/gpt3/gpt3_175b_distributed.flags \
    --data-path ${DATA_PATH:-data/openwebtext_text_document} \
    --vocab-file "${VOCAB_FILE:-data/gpt2/vocab.json}" --merge-file "${MERGE_FILE:-data/gpt2/merges.txt}" \
    --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" \
    --tensorboard-dir "${TENSORBOARD_LOGS_PATH:-$CHECKPOINT_PATH/tensorboard}" "$@"
