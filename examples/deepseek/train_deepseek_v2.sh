#!/usr/bin/env bash
# A model of DeepSeek-V2's architecture, from scratch: MLA, 160 experts and two shared ones in each layer but the first, of
# which a token uses 6 out of 3 of 8 groups.
#
# Hardware  256 GPUs of 80 GB, 32 nodes of 8; start it on each, see examples/launch.sh, or with examples/slurm.
# Layout    the paper's: 16 pipeline ranks with a zero-bubble schedule, the experts of a layer over 8 GPUs, ZeRO 1; 16
#           replicas of what isn't an expert, 2 of each expert. Ranks wait for 0.4 % of the time they compute.
# Memory    51.51 GB on the fullest GPU, of which 21.66 GB are activations, if tokens choose all experts equally
#           often; heads and experts are computed again in the backward pass.
# Time      1.6e22 FLOPs: 2.8 days at 256 x 250 TFLOP/s, an assumption (a quarter of an H100's peak).
# Fewer     NODES=16: 63.43 GB; twice as long.
# Balance   the line after each log line says how evenly experts are used; see docs/experts.md.
# Data      DATA_PATH: prefix of a data set that tools/preprocess_data.py made; TOKENIZER_MODEL: folder of tokenizer.json.
# Paths     Megatron-LM's, all or none, before the flags, or variables of these names:
#           CHECKPOINT_PATH TENSORBOARD_LOGS_PATH TOKENIZER_MODEL DATA_PATH
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
paths='CHECKPOINT_PATH TENSORBOARD_LOGS_PATH TOKENIZER_MODEL DATA_PATH'
source examples/paths.sh
CHECKPOINT_PATH=${CHECKPOINT_PATH:-runs/deepseek_v2}
export NODES=${NODES:-32}

exec bash examples/launch.sh pretrain_gpt.py @examples/deepseek/deepseek_v2.flags \
    --data-path ${DATA_PATH:-data/fineweb_text_document} --tokenizer-model "${TOKENIZER_MODEL:-data/deepseek_v2}" \
    --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" \
    --tensorboard-dir "${TENSORBOARD_LOGS_PATH:-$CHECKPOINT_PATH/tensorboard}" "$@"
