#!/usr/bin/env bash
# A model of Mixtral's 8x7B architecture, from scratch: 8 experts in each layer, of which a token uses 2.
#
# Hardware  64 GPUs of 80 GB, 8 nodes of 8; start it on each, see examples/launch.sh, or with examples/slurm.
# Layout    the experts of a layer divided over the 8 GPUs of a node, 32 layers over 4 pipeline ranks; 16 replicas of what
#           isn't an expert, 2 of each expert. Ranks wait for 18.8 % of the time they compute.
# Memory    55.33 GB on the fullest GPU, of which 34.19 GB are activations, if tokens choose all experts equally often.
# Time      1.6e21 FLOPs: 0.7 days at 64 x 400 TFLOP/s, an assumption (four tenths of an H100's peak); experts reach less.
# Fewer     NODES=4: 64.13 GB; twice as long.
# Balance   the line after each log line says how evenly experts are used; see docs/experts.md.
# Data      DATA_PATH: prefix of a data set that tools/preprocess_data.py made; TOKENIZER_MODEL: folder of tokenizer.json.
# Paths     Megatron-LM's, all or none, before the flags, or variables of these names:
#           CHECKPOINT_PATH TENSORBOARD_LOGS_PATH TOKENIZER_MODEL DATA_PATH
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
paths='CHECKPOINT_PATH TENSORBOARD_LOGS_PATH TOKENIZER_MODEL DATA_PATH'
source examples/paths.sh
CHECKPOINT_PATH=${CHECKPOINT_PATH:-runs/mixtral_8x7b}
export NODES=${NODES:-8}

exec bash examples/launch.sh pretrain_gpt.py @examples/mixtral/mixtral_8x7b.flags \
    --data-path ${DATA_PATH:-data/fineweb_text_document} --tokenizer-model "${TOKENIZER_MODEL:-data/mixtral}" \
    --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" \
    --tensorboard-dir "${TENSORBOARD_LOGS_PATH:-$CHECKPOINT_PATH/tensorboard}" "$@"
