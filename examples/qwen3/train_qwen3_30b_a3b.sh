#!/usr/bin/env bash
# A model of Qwen3-30B-A3B's architecture, from scratch: 128 narrow experts in each layer, of which a token uses 8.
#
# Hardware  16 GPUs of 80 GB, 2 nodes of 8; start it on each, see examples/launch.sh, or with examples/slurm.
# Layout    the experts of a layer divided over all 16 GPUs, as Megatron-Bridge publishes it for as many H100; 16 replicas of
#           what isn't an expert. Their activations are computed again in the backward pass.
# Memory    66.71 GB on a GPU, of which 22.63 GB are activations, if tokens choose all experts equally often.
# Time      4.6e20 FLOPs: 1.7 days at 16 x 200 TFLOP/s, what is published for this model on H100.
# Fewer     NODES=1 --expert-model-parallel-size 8 --recompute-granularity full --grad-reduce-in-bf16: 68.36 GB; twice as long.
# Balance   the line after each log line says how evenly experts are used; see docs/experts.md.
# Data      DATA_PATH: prefix of a data set that tools/preprocess_data.py made; TOKENIZER_MODEL: folder of tokenizer.json.
# Paths     Megatron-LM's, all or none, before the flags, or variables of these names:
#           CHECKPOINT_PATH TENSORBOARD_LOGS_PATH TOKENIZER_MODEL DATA_PATH
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
paths='CHECKPOINT_PATH TENSORBOARD_LOGS_PATH TOKENIZER_MODEL DATA_PATH'
source examples/paths.sh
CHECKPOINT_PATH=${CHECKPOINT_PATH:-runs/qwen3_30b_a3b}
export NODES=${NODES:-2}

exec bash examples/launch.sh pretrain_gpt.py @examples/qwen3/qwen3_30b_a3b.flags \
    --data-path ${DATA_PATH:-data/fineweb_text_document} --tokenizer-model "${TOKENIZER_MODEL:-data/qwen3}" \
    --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" \
    --tensorboard-dir "${TENSORBOARD_LOGS_PATH:-$CHECKPOINT_PATH/tensorboard}" "$@"
