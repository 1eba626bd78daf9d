#!/usr/bin/env bash
# A model of Mixtral's 8x22B architecture, from scratch: 8 experts in each layer, of which a token uses 2.
#
# Hardware  128 GPUs of 80 GB, 16 nodes of 8; start it on each, see examples/launch.sh, or with examples/slurm.
# Layout    each layer's attention over pairs of GPUs, its experts divided over the 8 of a node, 56 layers over 8 pipeline
#           ranks; 8 replicas of what isn't an expert, 2 of each expert (parallel folding,
#           arXiv:2504.14960). Ranks wait for 21.9 % of the time they compute.
# Memory    66.51 GB on the fullest GPU, of which 37.43 GB are activations, if tokens choose all experts equally often.
# Time      4.8e21 FLOPs: 1.1 days at 128 x 400 TFLOP/s, an assumption (four tenths of an H100's peak); experts reach less.
# Fewer     NODES=8 --recompute-granularity selective --recompute-modules moe_act: 72.42 GB; twice as long.
# Balance   the line after each log line says how evenly experts are used; see docs/experts.md.
# Data      DATA_PATH: prefix of a data set that tools/preprocess_data.py made; TOKENIZER_MODEL: folder of tokenizer.json.
# Paths     Megatron-LM's, all or none, before the flags, or variables of these names:
#           CHECKPOINT_PATH TENSORBOARD_LOGS_PATH TOKENIZER_MODEL DATA_PATH
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
paths='CHECKPOINT_PATH TENSORBOARD_LOGS_PATH TOKENIZER_MODEL DATA_PATH'
source examples/paths.sh
CHECKPOINT_PATH=${CHECKPOINT_PATH:-runs/mixtral_8x22b}
export NODES=${NODES:-16}

exec bash examples/launch.sh pretrain_gpt.py @examples/mixtral/mixtral_8x22b.flags \
    --data-path ${DATA_PATH:-data/fineweb_text_document} --tokenizer-model "${TOKENIZER_MODEL:-data/mixtral_8x22b}" \
    --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" \
    --tensorboard-dir "${TENSORBOARD_LOGS_PATH:-$CHECKPOINT_PATH/tensorboard}" "$@"
