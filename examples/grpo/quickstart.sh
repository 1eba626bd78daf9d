#!/usr/bin/env bash
# GRPO on CPU cores in a few minutes: a model that has read many wrong sums of two digits learns the right ones from a
# reward alone. bash examples/grpo/quickstart.sh [FOLDER]; the folder is runs/grpo unless given. RANKS=2 starts two ranks.
set -euo pipefail
out=$(realpath -m "${1:-runs/grpo}")
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
python=${PYTHON:-python}
launch=($python)
[[ ${RANKS:-1} -gt 1 ]] && launch=($python -m torch.distributed.run --standalone --nproc_per_node "$RANKS")
tokenizer=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$out/tokenizer")

$python examples/grpo/make_data.py "$out"
$python tools/train_tokenizer.py --input "$out/text.jsonl" --output-dir "$out/tokenizer" --vocab-size 257
$python tools/preprocess_data.py --input "$out/text.jsonl" --output-prefix "$out/text" "${tokenizer[@]}" --append-eod

echo "== pretraining on sums, of which about half are right"
"${launch[@]}" pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --position-embedding-type rope --swiglu \
    --normalization RMSNorm --attention-dropout 0 --hidden-dropout 0 "${tokenizer[@]}" --data-path "$out/text_text_document" --split 1,0,0 \
    --packing best-fit --seq-length 32 --num-workers 0 --micro-batch-size 32 --global-batch-size 64 --train-iters 300 --lr 3e-3 \
    --lr-warmup-iters 20 --min-lr 3e-4 --eval-iters 0 --log-interval 50 --save "$out/pretrained" --load "$out/pretrained" --save-interval 300

echo "== GRPO: 16 answers to each of 16 sums at a time, and two steps on them"
"${launch[@]}" pretrain_gpt.py --pretrained-checkpoint "$out/pretrained" --use-checkpoint-args "${tokenizer[@]}" \
    --perform-rl-step --grpo-prompts "$out/prompts.jsonl" --reward-function examples/grpo/rewards.py:right_sum \
    --grpo-prompts-per-step 16 --grpo-group-size 16 --grpo-iterations 1 --grpo-max-new-tokens 3 --grpo-kl-beta 0.01 \
    --grpo-clamp-eps-lower 0.2 --grpo-clamp-eps-upper 0.2 --seq-length 8 --micro-batch-size 64 --global-batch-size 128 \
    --train-iters 160 --lr 3e-4 --lr-decay-style constant --lr-warmup-iters 10 --eval-iters 0 --num-workers 0 --log-interval 10 \
    --save "$out/grpo" --load "$out/grpo" --save-interval 80

echo "== sums of which GRPO knew no prompt, ten answers sampled for each"
for model in pretrained grpo; do
    $python tools/text_generation_cli.py --load "$out/$model" --input-jsonl "$out/held_out.jsonl" \
        --output-jsonl "$out/$model.jsonl" --tokens-to-generate 3 --temperature 1
done
$python examples/grpo/rewards.py "$out/pretrained.jsonl" "$out/grpo.jsonl"
