#!/usr/bin/env bash
# From no model to one that prefers friendly answers, on a CPU core: a tokenizer, fine-tuning on chats in two tones, and
# DPO on pairs. bash examples/preferences/run.sh [FOLDER]; the folder is runs/preferences unless given.
set -euo pipefail
out=$(realpath -m "${1:-runs/preferences}")
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
python=${PYTHON:-python}
tokenizer=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$out/tokenizer")
steps=(--seq-length 128 --num-workers 0 --micro-batch-size 8 --global-batch-size 16 --eval-iters 2 --log-interval 10)

$python examples/preferences/make_data.py "$out"
$python tools/train_tokenizer.py --input "$out/text.txt" --output-dir "$out/tokenizer" --vocab-size 340 --min-frequency 1 \
    --special-tokens '<|im_start|>' '<|im_end|>'
$python tools/preprocess_sft.py --input "$out/chats.jsonl" --output-prefix "$out/chats" "${tokenizer[@]}"
$python tools/preprocess_preferences.py --input "$out/pairs.jsonl" --output-prefix "$out/pairs" "${tokenizer[@]}"

$python pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --position-embedding-type rope --swiglu \
    --normalization RMSNorm --attention-dropout 0 --hidden-dropout 0 "${tokenizer[@]}" "${steps[@]}" --data-path "$out/chats" \
    --split 9,1,0 --sft --packing best-fit --train-iters 200 --lr 3e-3 --lr-warmup-iters 10 --eval-interval 100 \
    --save "$out/sft" --load "$out/sft" --save-interval 200
$python pretrain_gpt.py --pretrained-checkpoint "$out/sft" --use-checkpoint-args "${tokenizer[@]}" "${steps[@]}" \
    --data-path "$out/pairs" --split 9,1,0 --preference-loss dpo --preference-sft-weight 1 --train-iters 60 --lr 2e-4 \
    --lr-warmup-iters 5 --eval-interval 30 --save "$out/dpo" --load "$out/dpo" --save-interval 60
for model in sft dpo; do
    echo "== answers of $model"
    echo 'What colour is the fox?' |
        $python tools/text_generation_cli.py --load "$out/$model" --chat --temperature 0
done
