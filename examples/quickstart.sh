#!/usr/bin/env bash
# From text files to a trained, resumed and evaluated GPT, on two CPU cores: bash examples/quickstart.sh
#
# Six to ten minutes on two cores: four to eight of training, and installing the first time. Nothing is downloaded but
# packages: the corpus is the English that every Python carries. What it runs is printed as the commands you would type,
# from the repository's root. Everything it makes lies in runs/quickstart and .venv; a second run keeps .venv and trains
# anew.
#
# Expect the training loss to fall from 9.1 (guessing among 8,192 tokens costs 9.0) to about 4.3, the loss on documents
# kept out of training to about 5.0, and text that looks like documentation without being any.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

out=${QUICKSTART_DIR:-runs/quickstart}
iterations=${QUICKSTART_ITERATIONS:-1600}
half=$((iterations / 2)) eval_iters=$((iterations < 640 ? iterations / 40 : 16))
source examples/quickstart_steps.sh

environment

mkdir -p "$out"
rm -rf "$out"/{corpus,tokenizer,data,checkpoints,tensorboard} "$out"/{perplexity.txt,sample.txt,loss.txt,loss.png}

corpus

tokens 8192

say "5. Training on two ranks, stopped half-way"
pretrain=(
    .venv/bin/torchrun --standalone --nproc_per_node=2 pretrain_gpt.py --distributed-backend gloo
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --attention-dropout 0 --hidden-dropout 0
    --train-data-path "$out/data/train_text_document" --valid-data-path "$out/data/heldout_text_document"
    "${tokenizer[@]}"
    --micro-batch-size 4 --global-batch-size 8 --train-iters "$iterations"
    --lr 4e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-fraction 0.05
    --init-method-std 0.05 --weight-decay 0.1 --adam-beta2 0.95
    --eval-interval "$((iterations / 8))" --eval-iters "$eval_iters"
    --save "$out/checkpoints" --load "$out/checkpoints" --save-interval "$half"
    --log-interval "$((iterations / 40))" --log-throughput --tensorboard-dir "$out/tensorboard"
)
run "${pretrain[@]}" --exit-interval "$half"

say "6. The same command again goes on from the checkpoint"
run "${pretrain[@]}"

say "7. Perplexity on documents that were kept out of training"
keep "$out/perplexity.txt" \
    $python tasks/main.py --task LM --load "$out/checkpoints" --valid-data "$out/corpus/heldout.jsonl"

say "8. Text from the trained model"
sample 80

say "9. The loss as a picture"
picture "GPT on the documentation of Python"

result
places perplexity perplexity.txt text sample.txt
more_text
