#!/usr/bin/env bash
# A small mixture of experts on two CPU cores, its experts divided over two ranks: bash examples/experts/quickstart.sh
#
# A minute or two of training after half a minute of preparation; the corpus is the English that every Python
# carries. Each of 4 layers has 8 experts, of which a token chooses 2, and a loss keeps all of them busy. After each
# log line stands how evenly they are used: a max violation of 0.5 means that the busiest expert has one and a half
# times its share. Everything it makes lies in runs/quickstart_experts and .venv.
#
# Expect the loss to fall from 8.6 to about 5.6 in 300 steps (QUICKSTART_ITERATIONS=2000 takes it further), and the max
# violation from 0.7 at first to about 0.2, with no dead expert and the busier rank at 1.05 times the mean.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

out=${QUICKSTART_DIR:-runs/quickstart_experts}
iterations=${QUICKSTART_ITERATIONS:-300}
source examples/quickstart_steps.sh

environment

mkdir -p "$out"
rm -rf "$out"/{corpus,tokenizer,data,checkpoints,tensorboard} "$out"/{log.txt,loss.txt,loss.png}

corpus

say "3. Tokenizer: a byte-level BPE of 4,096 tokens"
run $python tools/train_tokenizer.py --input "$out/corpus/train.jsonl" --vocab-size 4096 --output-dir "$out/tokenizer"

say "4. Token files"
tokenizer=(
    --tokenizer-type GPT2BPETokenizer
    --vocab-file "$out/tokenizer/vocab.json"
    --merge-file "$out/tokenizer/merges.txt"
)
for part in train heldout; do
    run $python tools/preprocess_data.py --input "$out/corpus/$part.jsonl" --output-prefix "$out/data/$part" \
        "${tokenizer[@]}" --append-eod --workers 2
done

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

say "6. The loss as a picture"
picture "A mixture of experts on the documentation of Python"

say "Done in $((SECONDS / 60)) min $((SECONDS % 60)) s"
sed -n '1s/^[^:]*: /The loss fell: /p' "$out/loss.txt"
grep '^ experts' "$out/log.txt" | sed -n '1s/^/At first:/p;$s/^/In the end:/p'
