#!/usr/bin/env bash
# A model of Llama 3's 70 B architecture, from scratch, at 8,192 tokens, 20 tokens a parameter.
#
# Hardware  512 GPUs of 80 GB, 64 nodes of 8; start it on each, see examples/launch.sh, or with examples/slurm.
# Layout    layers split over the 8 GPUs of a node, sequences over 2 nodes, 80 layers over 4 pipeline ranks in 5
#           chunks each; 8 replicas. Sequences are split so that no activation is computed twice: whole, they
#           would take 13.81 GB more. Ranks wait for 0.9 % of the time they compute.
# Memory    29.26 GB on the fullest GPU, of which 13.82 GB are activations.
# Time      6.3e23 FLOPs: 35.5 days at 512 x 400 TFLOP/s, an assumption (four tenths of an H100's peak).
# Fewer     NODES=16: 34.37 GB; four times as long.
#           NODES=8: 41.19 GB; a single replica.
#           NODES=4 --context-parallel-size 1 --recompute-granularity full: 43.03 GB; all layers computed twice.
# Data      DATA_PATH: prefix of a data set that tools/preprocess_data.py made; TOKENIZER_MODEL: folder of tokenizer.json.
# Paths     Megatron-LM's, all or none, before the flags, or variables of these names:
#           CHECKPOINT_PATH TENSORBOARD_LOGS_PATH TOKENIZER_MODEL DATA_PATH
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
paths='CHECKPOINT_PATH TENSORBOARD_LOGS_PATH TOKENIZER_MODEL DATA_PATH'
source examples/paths.sh
CHECKPOINT_PATH=${CHECKPOINT_PATH:-runs/llama3_70b}

export NODES="${NODES:-64}"
exec bash examples/launch.sh pretrain_gpt.py @examples/llama/llama3_70b.flags \
    --data-path ${DATA_PATH:-data/fineweb_text_document} --tokenizer-model "${TOKENIZER_MODEL:-data/llama3}" \
    --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" \
    --tensorboard-dir "${TENSORBOARD_LOGS_PATH:-$CHECKPOINT_PATH/tensorboard}" "$@"
