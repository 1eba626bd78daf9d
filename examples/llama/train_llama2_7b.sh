#!/usr/bin/env bash
# A model of Llama 2's 7 B architecture, from scratch, 4 million tokens a step, 20 tokens a parameter.
#
# Hardware  16 GPUs of 80 GB, 2 nodes of 8; start it on each, see examples/launch.sh, or with examples/slurm.
# Layout    16 data-parallel replicas, optimizer state sharded over them; without splitting layers only gradients
#           and weights cross between nodes, once a step.
# Memory    65.66 GB, of which 19.44 GB are activations.
# Time      6.0e21 FLOPs: 10.9 days at 16 x 400 TFLOP/s, an assumption (four tenths of an H100's peak).
# Fewer     NODES=1: 70.71 GB; 22 days.
#           NODES=1 --tensor-model-parallel-size 2 --sequence-parallel: 40.64 GB; for 8 GPUs of 48 GB or more.
# Data      DATA_PATH: prefix of a data set that tools/preprocess_data.py made; TOKENIZER_MODEL: folder of tokenizer.json.
# Paths     Megatron-LM's, all or none, before the flags, or variables of these names:
#           CHECKPOINT_PATH TENSORBOARD_LOGS_PATH TOKENIZER_MODEL DATA_PATH
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
paths='CHECKPOINT_PATH TENSORBOARD_LOGS_PATH TOKENIZER_MODEL DATA_PATH'
source examples/paths.sh
CHECKPOINT_PATH=${CHECKPOINT_PATH:-runs/llama2_7b}

export NODES="${NODES:-2}"
exec bash examples/launch.sh pretrain_gpt.py @examples/llama/llama2_7b.flags \
    --data-path ${DATA_PATH:-data/fineweb_text_document} --tokenizer-model "${TOKENIZER_MODEL:-data/llama2}" \
    --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" \
    --tensorboard-dir "${TENSORBOARD_LOGS_PATH:-$CHECKPOINT_PATH/tensorboard}" "$@"
