#!/usr/bin/env bash
# A small hybrid on two CPU cores: Mamba-2 layers, one attention layer, MLPs: bash examples/hybrid/quickstart.sh
#
# Two or three minutes of training after half a minute of preparation; the corpus is the English that every Python
# carries. The first half is trained with the heads of each layer over two ranks (tensor parallelism), the second with
# the layers over them (pipeline parallelism), from the same checkpoint. Everything it makes lies in
# runs/quickstart_hybrid and .venv.
#
# Expect the loss to fall from 8.5 to about 5.5, also on text that was kept out of training (QUICKSTART_ITERATIONS=1000
# takes it further), and text that looks like documentation without being any.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

out=${QUICKSTART_DIR:-runs/quickstart_hybrid}
iterations=${QUICKSTART_ITERATIONS:-300}
source examples/quickstart_steps.sh

environment

mkdir -p "$out"
rm -rf "$out"/{corpus,tokenizer,data,checkpoints,tensorboard} "$out"/{log.txt,resumed.txt,heldout.txt,sample.txt,loss.txt,loss.png}

corpus

tokens 4096

train() { # train LOG FLAGS...
    local log=$1
    shift
    keep "$log" .venv/bin/torchrun --standalone --nproc_per_node=2 pretrain_hybrid.py --distributed-backend gloo \
        --hybrid-layer-pattern M-M*-M- --hidden-size 128 --num-attention-heads 4 --seq-length 128 \
        --mamba-head-dim 32 --mamba-state-dim 32 --mamba-num-groups 2 \
        --position-embedding-type none --normalization RMSNorm --disable-bias-linear --squared-relu \
        --attention-dropout 0 --hidden-dropout 0 \
        --train-data-path "$out/data/train_text_document" --valid-data-path "$out/data/heldout_text_document" \
        "${tokenizer[@]}" \
        --micro-batch-size 4 --global-batch-size 8 --train-iters "$iterations" \
        --lr 4e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-fraction 0.05 \
        --init-method-std 0.05 --weight-decay 0.1 --adam-beta2 0.95 \
        --eval-interval "$((iterations / 2))" --eval-iters 8 \
        --save "$out/checkpoints" --load "$out/checkpoints" --save-interval "$((iterations / 2))" \
        --log-interval "$((iterations / 20))" --log-throughput --tensorboard-dir "$out/tensorboard" "$@"
}

say "5. The first half of the training, with the heads of each layer over two ranks"
train "$out/log.txt" --tensor-model-parallel-size 2 --sequence-parallel --exit-interval "$((iterations / 2))"

say "6. The second half, with the layers over two ranks"
train "$out/resumed.txt" --pipeline-model-parallel-size 2

say "7. The perplexity of text that was kept out of training"
keep "$out/heldout.txt" $python tasks/main.py --task LM --load "$out/checkpoints" --valid-data "$out/corpus/heldout.jsonl"

say "8. Text from the trained model, whose Mamba-2 layers keep states of a fixed size"
sample 60

say "9. The loss as a picture"
picture "A hybrid on the documentation of Python"

result
places 'held-out text' heldout.txt text sample.txt
more_text
