#!/usr/bin/env bash
# A model of OLMo Hybrid 7B's architecture, from scratch: gated delta nets in 24 of 32 layers, attention in the others.
#
# Hardware  32 GPUs of 80 GB, 4 nodes of 8; start it on each, see examples/launch.sh, or with examples/slurm.
# Layout    32 replicas. What gated delta nets and MLPs compute is computed again in the backward pass.
# Memory    70.18 GB on a GPU, of which 20.23 GB are activations.
# Time      8.8e20 FLOPs: 0.8 days at 32 x 400 TFLOP/s, a good speed of an H100.
# Fewer     NODES=1 --recompute-granularity full: 61.53 GB; more than four times as long.
# Data      DATA_PATH: prefix of a data set that tools/preprocess_data.py made; TOKENIZER_MODEL: folder of tokenizer.json.
# Paths     Megatron-LM's, all or none, before the flags, or variables of these names:
#           CHECKPOINT_PATH TENSORBOARD_LOGS_PATH TOKENIZER_MODEL DATA_PATH
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
paths='CHECKPOINT_PATH TENSORBOARD_LOGS_PATH TOKENIZER_MODEL DATA_PATH'
source examples/paths.sh
CHECKPOINT_PATH=${CHECKPOINT_PATH:-runs/olmo_hybrid_7b}
export NODES=${NODES:-4}

exec bash examples/launch.sh pretrain_gpt.py @examples/olmo/olmo_hybrid_7b.flags \
    --data-path ${DATA_PATH:-data/fineweb_text_document} --tokenizer-model "${TOKENIZER_MODEL:-data/olmo_hybrid}" \
    --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" \
    --tensorboard-dir "${TENSORBOARD_LOGS_PATH:-$CHECKPOINT_PATH/tensorboard}" "$@"
