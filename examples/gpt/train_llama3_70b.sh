#!/usr/bin/env bash
# A model of Llama 3's 70 B architecture, from scratch, at 8,192 tokens, 20 tokens a parameter.
#
# Hardware  512 GPUs of 80 GB, 64 nodes of 8; start it on each, see examples/launch.sh, or with examples/slurm.
# Layout    layers split over the 8 GPUs of a node, sequences over 2 nodes, 80 layers over 4 pipeline ranks in 5
#           chunks each; 8 replicas. Sequences are split so that no activation is computed twice: whole, they
#           would take 24.61 GB more. Ranks wait for 0.9 % of the time they compute.
# Memory    40.17 GB on the fullest GPU, of which 24.61 GB are activations.
# Time      6.3e23 FLOPs: 35.5 days at 512 x 400 TFLOP/s, an assumption (four tenths of an H100's peak).
# Fewer     NODES=16: 45.28 GB; four times as long.
#           NODES=8: 52.09 GB; a single replica.
#           NODES=4 --context-parallel-size 1 --recompute-granularity full: 43.29 GB; all layers computed twice.
# Data      DATA: prefix of a data set that tools/preprocess_data.py made; TOKENIZER: folder of tokenizer.json.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

export NODES="${NODES:-64}"
exec bash examples/launch.sh pretrain_gpt.py @examples/gpt/llama3_70b.flags \
    --data-path "${DATA:-data/fineweb_text_document}" --tokenizer-model "${TOKENIZER:-data/llama3}" \
    --save runs/llama3_70b --load runs/llama3_70b --tensorboard-dir runs/llama3_70b/tensorboard "$@"
