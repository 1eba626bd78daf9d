#!/usr/bin/env bash
# From a trained model to a smaller one, on two CPU cores: bash examples/prune/quickstart.sh
#
# Six to eight minutes on two cores. A model is trained on the English that every Python carries; half of its weights
# are kept, those that matter most to its own data; and the smaller model learns on, from the large one's distributions.
# Beside it the same small model is trained from random weights, for as many steps on the same data. Everything that it
# makes lies in runs/quickstart_prune and .venv.
#
# Expect losses on text that was kept out of training of 4.8 for the large model, 4.9 for the small one that it taught, and
# 5.4 for the small one that was trained alone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

out=${QUICKSTART_DIR:-runs/quickstart_prune}
iterations=${QUICKSTART_ITERATIONS:-1000}
steps=$((iterations / 2)) eval_iters=$((iterations < 640 ? 2 : 16))
source examples/quickstart_steps.sh

environment

mkdir -p "$out"
rm -rf "$out"/{corpus,tokenizer,data,large,pruned,distilled,scratch,curves} "$out"/{pruned.txt,loss.txt,loss.png}

corpus

tokens 4096

train() { # train NAME ITERATIONS FLAGS...: a run on the corpus in $out/NAME
    local name=$1 iterations=$2
    shift 2
    run .venv/bin/torchrun --standalone --nproc_per_node=2 pretrain_gpt.py --distributed-backend gloo "$@" \
        --train-data-path "$out/data/train_text_document" --valid-data-path "$out/data/heldout_text_document" \
        "${tokenizer[@]}" --attention-dropout 0 --hidden-dropout 0 \
        --micro-batch-size 4 --global-batch-size 8 --train-iters "$iterations" \
        --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-fraction 0.05 --weight-decay 0.1 --adam-beta2 0.95 \
        --eval-interval "$((iterations / 4))" --eval-iters "$eval_iters" --save "$out/$name" --save-interval "$iterations" \
        --log-interval "$((iterations / 20))" --tensorboard-dir "$out/curves/$name"
}
shape=(--seq-length 128 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear)

say "5. The large model: 4 layers, 4 heads, a hidden size of 128"
train large "$iterations" "${shape[@]}" --num-layers 4 --hidden-size 128 --num-attention-heads 4 --ffn-hidden-size 384 \
    --init-method-std 0.05 --lr 4e-3

say "6. Pruned: what matters least to its own data is left out"
keep "$out/pruned.txt" $python tools/checkpoint/prune.py --load "$out/large" --save "$out/pruned" \
    --data-path "$out/data/train_text_document" --samples 64 \
    --target-num-layers 3 --target-hidden-size 96 --target-ffn-hidden-size 192

say "7. The smaller model learns on from the large one"
train distilled "$steps" --load "$out/pruned" --use-checkpoint-args --finetune --teacher-load "$out/large" --lr 2e-3

say "8. The same small model from random weights, for as many steps"
train scratch "$steps" "${shape[@]}" --num-layers 3 --hidden-size 96 --num-attention-heads 4 --kv-channels 32 \
    --ffn-hidden-size 192 --init-method-std 0.05 --lr 4e-3

say "9. Both losses as a picture"
keep "$out/loss.txt" $python tools/plot_loss.py "$out/curves/distilled" "$out/curves/scratch" \
    --output "$out/loss.png" --title "A pruned model that learns from the whole one, and one from random weights"

say "Done in $((SECONDS / 60)) min $((SECONDS % 60)) s"
echo
cat "$out/loss.txt"
cat <<END

  large model    $out/large
  small model    $out/distilled
  what was kept  $out/pruned.txt
  curves         $out/loss.png
END
