#!/usr/bin/env bash
# A model of Qwen3-Next-80B-A3B's architecture, from scratch: gated delta nets in 36 of 48 layers, gated attention in the
# others, and 512 narrow experts in each layer, of which a token uses 10 and a shared one.
#
# Hardware  64 GPUs of 80 GB, 8 nodes of 8; start it on each, see examples/launch.sh, or with examples/slurm.
# Layout    the experts of a layer divided over 32 GPUs, two replicas of each; 64 replicas of what isn't an expert.
#           What gated delta nets, shared experts and activations compute is computed again in the backward pass.
# Memory    68.68 GB on a GPU, of which 24.00 GB are activations, if tokens choose all experts equally often.
# Time      4.6e20 FLOPs: 0.4 days at 64 x 200 TFLOP/s, what is published for Qwen3-30B-A3B on H100.
# Fewer     NODES=4 --recompute-granularity full: 61.15 GB; twice as long.
# Balance   the line after each log line says how evenly experts are used; see docs/experts.md.
# Data      DATA_PATH: prefix of a data set that tools/preprocess_data.py made; TOKENIZER_MODEL: folder of tokenizer.json.
# Paths     Megatron-LM's, all or none, before the flags, or variables of these names:
#           CHECKPOINT_PATH TENSORBOARD_LOGS_PATH TOKENIZER_MODEL DATA_PATH
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
paths='CHECKPOINT_PATH TENSORBOARD_LOGS_PATH TOKENIZER_MODEL DATA_PATH'
source examples/paths.sh
CHECKPOINT_PATH=${CHECKPOINT_PATH:-runs/qwen3_next_80b_a3b}
export NODES=${NODES:-8}

exec bash examples/launch.sh pretrain_gpt.py @examples/qwen3/qwen3_next_80b_a3b.flags \
    --data-path ${DATA_PATH:-data/fineweb_text_document} --tokenizer-model "${TOKENIZER_MODEL:-data/qwen3}" \
    --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" \
    --tensorboard-dir "${TENSORBOARD_LOGS_PATH:-$CHECKPOINT_PATH/tensorboard}" "$@"
