#!/usr/bin/env bash
# From text files to a trained T5 that fills in missing spans, on two CPU cores: bash examples/t5/quickstart.sh
#
# Three or four minutes of training after half a minute of preparation. Nothing is downloaded but packages: the corpus is
# the English that every Python carries. What it runs is printed as the commands you would type, from the repository's
# root. Everything it makes lies in runs/quickstart_t5 and .venv; a second run keeps .venv and trains anew.
#
# Expect the loss to fall from 8.0 to about 2.4, and on held-out text to 2.65, where guessing by how often each token occurs
# costs 4.5; a fifth of the first tokens of held-out spans to be right, and nearly two fifths among five guesses, three and
# two times what the commonest tokens reach; and gaps that are filled with words that fit ("the [MASK] argument is a
# string": default). A T5 learns late what stands around a gap: the encoder has to put it where the gap is named, and the
# decoder has to look there. Short texts, many small steps and one layer on either side bring that forward; what it says is
# grammar more than sense.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

out=${QUICKSTART_DIR:-runs/quickstart_t5}
iterations=${QUICKSTART_ITERATIONS:-5000}
source examples/quickstart_steps.sh

environment

mkdir -p "$out"
rm -rf "$out"/{corpus,tokenizer,data,checkpoints,tensorboard} "$out"/{filled.txt,loss.txt,loss.png}

corpus

tokenizer=(--tokenizer-type BertWordPieceLowerCase --vocab-file "$out/tokenizer/vocab.txt" --vocab-extra-ids 20)
pieces "${tokenizer[@]}"

say "5. Training on two ranks"
run .venv/bin/torchrun --standalone --nproc_per_node=2 pretrain_t5.py --distributed-backend gloo \
    --num-layers 1 --decoder-num-layers 1 --hidden-size 128 --num-attention-heads 8 --seq-length 16 \
    --decoder-seq-length 12 --mask-prob 0.3 --position-embedding-type rope --add-qkv-bias --qk-layernorm \
    --normalization RMSNorm --geglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 \
    --train-data-path "$out/data/train_text_sentence" --valid-data-path "$out/data/heldout_text_sentence" \
    "${tokenizer[@]}" \
    --micro-batch-size 32 --global-batch-size 64 --train-iters "$iterations" \
    --lr 4e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-fraction 0.05 \
    --init-method-std 0.09 --weight-decay 0.1 --adam-beta2 0.95 \
    --eval-interval "$((iterations / 4))" --eval-iters 8 \
    --save "$out/checkpoints" --save-interval "$iterations" \
    --log-interval "$((iterations / 20))" --log-throughput --tensorboard-dir "$out/tensorboard"

say "6. What it says where words are missing, in texts and in held-out samples"
keep "$out/filled.txt" $python tools/fill_spans.py --load "$out/checkpoints" \
    --text "This function [MASK] be called directly." "Return the number [MASK] bytes." \
    "The [MASK] argument is a string." "A file [MASK] is opened for reading." \
    --samples 1000 --examples 6

say "7. The loss as a picture"
picture "T5 on the documentation of Python"

summary fill_spans.py "$(tail -n 1 "$out/filled.txt")"
