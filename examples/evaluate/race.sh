#!/usr/bin/env bash
# Fine-tune the 340 M BERT of examples/bert on RACE for 3 epochs, with scores after each, on the 8 GPUs of one node.
#
# Hardware  8 GPUs of 16 GB or more, bf16.
# Memory    13.40 GB a GPU, by --dry-run; with --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2: 6.39 GB.
# Data      RACE: folder with train, dev and test as published; BERT: folder of the pretrained model; VOCAB: its vocab.txt.
# Score     bash examples/evaluate/race.sh --epochs 0    scores what was fine-tuned, at any layout.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
race=${RACE:-data/RACE}

exec bash examples/launch.sh tasks/main.py --task RACE --epochs 3 \
    --train-data "$race/train/middle" "$race/train/high" --valid-data "$race/dev/middle" "$race/dev/high" \
    --pretrained-checkpoint "${BERT:-runs/bert_340m}" --vocab-file "${VOCAB:-data/bert/vocab.txt}" \
    --no-use-checkpoint-args --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 \
    --vocab-size 30524 --micro-batch-size 4 --global-batch-size 32 \
    --lr 1e-5 --lr-decay-style linear --lr-warmup-fraction 0.06 --weight-decay 0.01 --clip-grad 1.0 --bf16 \
    --log-interval 100 --save runs/race --load runs/race --result-file runs/race/scores.json "$@"
