#!/usr/bin/env bash
# A small mixture of experts on two CPU cores, its experts divided over two ranks: bash examples/experts/quickstart.sh
#
# Two or three minutes of training after half a minute of preparation; the corpus is the English that every Python
# carries. Each of 4 layers has 8 experts, of which a token chooses 2, and a loss keeps all of them busy. After each
# log line stands how evenly they are used: a max violation of 0.5 means that the busiest expert has one and a half
# times its share. Everything it makes lies in runs/quickstart_experts and .venv.
#
# Expect the loss to fall from 8.5 to about 4.5, and on text that was kept out of training to 4.9 (QUICKSTART_ITERATIONS=2000
# takes it further); the max violation from 2.3 at its worst to about 0.2, with no dead expert
# and the busier rank at 1.03 times the mean; and text that looks like documentation without being any.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

out=${QUICKSTART_DIR:-runs/quickstart_experts}
iterations=${QUICKSTART_ITERATIONS:-1000}
source examples/quickstart_steps.sh

environment

mkdir -p "$out"
rm -rf "$out"/{corpus,tokenizer,data,checkpoints,tensorboard} "$out"/{log.txt,sample.txt,loss.txt,loss.png,balance.txt,balance.png}

corpus

tokens 4096

say "5. Training on two ranks, with half of the experts on each"
keep "$out/log.txt" .venv/bin/torchrun --standalone --nproc_per_node=2 pretrain_gpt.py --distributed-backend gloo \
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 \
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear \
    --attention-dropout 0 --hidden-dropout 0 \
    --num-experts 8 --moe-ffn-hidden-size 128 --moe-router-topk 2 --expert-model-parallel-size 2 \
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.05 \
    --train-data-path "$out/data/train_text_document" --valid-data-path "$out/data/heldout_text_document" \
    "${tokenizer[@]}" \
    --micro-batch-size 4 --global-batch-size 8 --train-iters "$iterations" \
    --lr 4e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-fraction 0.05 \
    --init-method-std 0.05 --weight-decay 0.1 --adam-beta2 0.95 \
    --eval-interval "$((iterations / 2))" --eval-iters 8 \
    --save "$out/checkpoints" --save-interval "$iterations" \
    --log-interval "$((iterations / 20))" --log-throughput --tensorboard-dir "$out/tensorboard"

say "6. Text from the trained model, whose experts are all in one process now"
sample 60

say "7. The loss, and how evenly the experts are used, as pictures"
picture "A mixture of experts on the documentation of Python"
keep "$out/balance.txt" $python tools/plot_loss.py "$out/tensorboard" --curve moe/max_violation \
    --output "$out/balance.png" --title "How far the busiest expert is above its share"

result
grep '^ experts' "$out/log.txt" | sed -n '1s/^/At first:/p;$s/^/In the end:/p'
places balance balance.png text sample.txt
more_text
