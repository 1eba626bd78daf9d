#!/usr/bin/env bash
# LLaVA 1.5's first stage: the projector between a trained encoder and a trained language model, from captions.
#
# Hardware  8 GPUs of 80 GB on one node.
# Layout    8 replicas; only the projector has gradients and optimizer state.
# Memory    55.61 GB on a GPU, of which 40.78 GB are activations.
# Time      1.1e19 FLOPs: 0.0 days at 8 x 400 TFLOP/s, an hour, an assumption (four tenths of an H100's peak).
# Fewer     GPUS_PER_NODE=1 --recompute-granularity full: 18.67 GB; one GPU of 24 GB, about eleven times as long.
# Data      DATA_PATH: prefix of captions that tools/preprocess_images.py made; TOKENIZER_MODEL: folder of tokenizer.json.
#           PRETRAINED: checkpoint with encoder and language model, as tools/checkpoint/add_vision_encoder.py writes it.
# Paths     Megatron-LM's, all or none, before the flags, or variables of these names:
#           CHECKPOINT_PATH TENSORBOARD_LOGS_PATH TOKENIZER_MODEL DATA_PATH
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
paths='CHECKPOINT_PATH TENSORBOARD_LOGS_PATH TOKENIZER_MODEL DATA_PATH'
source examples/paths.sh
CHECKPOINT_PATH=${CHECKPOINT_PATH:-runs/llava15_7b_projector}

export NODES="${NODES:-1}"
exec bash examples/launch.sh pretrain_vlm.py @examples/vision_language/llava15_7b_projector.flags \
    --data-path ${DATA_PATH:-data/llava_captions} --tokenizer-model "${TOKENIZER_MODEL:-data/llava}" \
    --pretrained-checkpoint "${PRETRAINED:-runs/llava15_7b_parts}" --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" \
    --tensorboard-dir "${TENSORBOARD_LOGS_PATH:-$CHECKPOINT_PATH/tensorboard}" "$@"
