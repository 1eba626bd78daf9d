#!/usr/bin/env bash
# A model of DeepSeek-V3's architecture, from scratch: MLA, 256 experts and a shared one in each layer but three, of which a
# token uses 8, biases that balance them, and a layer that predicts a second token.
#
# Hardware  2048 GPUs of 80 GB, 256 nodes of 8; start it on each, see examples/launch.sh, or with examples/slurm.
# Layout    the paper's: 16 pipeline ranks, the experts of a layer over 64 GPUs, ZeRO 1; 128 replicas of what isn't an
#           expert, 2 of each expert. The schedule is ZB-V, whose stages lie as those of its DualPipe; here a backward pass
#           isn't computed beside a forward pass's messages. Ranks wait for 2.1 % of the time they compute.
# Memory    56.80 GB on the fullest GPU, of which 28.13 GB are activations, if tokens choose all experts equally
#           often; heads and experts are computed again in the backward pass. The paper trains in fp8; this is bf16.
# Time      2.6e22 FLOPs: 0.6 days at 2048 x 250 TFLOP/s, an assumption (a quarter of an H100's peak).
# Fewer     NODES=128: 59.25 GB; twice as long.
# Balance   the line after each log line says how evenly experts are used; see docs/experts.md.
# Data      DATA_PATH: prefix of a data set that tools/preprocess_data.py made; TOKENIZER_MODEL: folder of tokenizer.json.
# Paths     Megatron-LM's, all or none, before the flags, or variables of these names:
#           CHECKPOINT_PATH TENSORBOARD_LOGS_PATH TOKENIZER_MODEL DATA_PATH
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
paths='CHECKPOINT_PATH TENSORBOARD_LOGS_PATH TOKENIZER_MODEL DATA_PATH'
source examples/paths.sh
CHECKPOINT_PATH=${CHECKPOINT_PATH:-runs/deepseek_v3}
export NODES=${NODES:-256}

exec bash examples/launch.sh pretrain_gpt.py @examples/deepseek/deepseek_v3.flags \
    --data-path ${DATA_PATH:-data/fineweb_text_document} --tokenizer-model "${TOKENIZER_MODEL:-data/deepseek_v3}" \
    --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" \
    --tensorboard-dir "${TENSORBOARD_LOGS_PATH:-$CHECKPOINT_PATH/tensorboard}" "$@"
