#!/usr/bin/env bash
# LLaVA 1.5's second stage: projector and language model, from conversations about images.
#
# Hardware  8 GPUs of 80 GB on one node.
# Layout    8 replicas, optimizer state sharded over them; the encoder stays as it is.
# Memory    72.41 GB on a GPU, of which 20.39 GB are activations.
# Time      2.8e19 FLOPs: 0.1 days at 8 x 400 TFLOP/s, two and a half hours, an assumption (four tenths of an H100's peak).
# Fewer     GPUS_PER_NODE=4 --tensor-model-parallel-size 2 --sequence-parallel: 51.77 GB; twice the time.
# Data      DATA_PATH: prefix of conversations that tools/preprocess_images.py made; TOKENIZER_MODEL: folder of tokenizer.json.
#           PRETRAINED: checkpoint of the first stage.
# Paths     Megatron-LM's, all or none, before the flags, or variables of these names:
#           CHECKPOINT_PATH TENSORBOARD_LOGS_PATH TOKENIZER_MODEL DATA_PATH
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
paths='CHECKPOINT_PATH TENSORBOARD_LOGS_PATH TOKENIZER_MODEL DATA_PATH'
source examples/paths.sh
CHECKPOINT_PATH=${CHECKPOINT_PATH:-runs/llava15_7b}

export NODES="${NODES:-1}"
exec bash examples/launch.sh pretrain_vlm.py @examples/vision_language/llava15_7b.flags \
    --data-path ${DATA_PATH:-data/llava_conversations} --tokenizer-model "${TOKENIZER_MODEL:-data/llava}" \
    --pretrained-checkpoint "${PRETRAINED:-runs/llava15_7b_projector}" --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" \
    --tensorboard-dir "${TENSORBOARD_LOGS_PATH:-$CHECKPOINT_PATH/tensorboard}" "$@"
