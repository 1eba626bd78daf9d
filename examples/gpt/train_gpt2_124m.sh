#!/usr/bin/env bash
# GPT-2 small, 124 M parameters, half a million tokens a step.
#
# Hardware  8 GPUs of 24 GB or more (GPUS_PER_NODE says otherwise; the batch stays the same).
# Time      300 B tokens are 2.6e20 FLOPs: about two days at 8 x 200 TFLOP/s.
# Loss      published runs of this model on OpenWebText reach a validation loss of about 2.85; not repeated here.
# Data      DATA: prefix of a data set that tools/preprocess_data.py made; GPT2: folder of vocab.json and merges.txt.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

exec bash examples/launch.sh pretrain_gpt.py @examples/gpt/gpt2_124m.flags \
    --data-path "${DATA:-data/openwebtext_text_document}" \
    --vocab-file "${GPT2:-data/gpt2}/vocab.json" --merge-file "${GPT2:-data/gpt2}/merges.txt" \
    --save runs/gpt2_124m --load runs/gpt2_124m --tensorboard-dir runs/gpt2_124m/tensorboard "$@"
