#!/usr/bin/env bash
# Learning from rewards alone (GRPO), on two CPU cores: bash examples/grpo/quickstart.sh
#
# A small model reads sums of two digits: a third of the texts is exact (7+5=12), the others are guesses up to 4 beside the
# sum (7+5=~10). Like these texts it mostly guesses. The reward says only whether the number is right, and GRPO teaches the
# model not to guess, also where it is asked for sums that GRPO had no prompt of. Everything that it makes lies in
# runs/quickstart_grpo and .venv.
#
# Two to three minutes. Expect right answers to rise from about 40 to about 90 of 100.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

out=${QUICKSTART_DIR:-runs/quickstart_grpo}
iterations=${QUICKSTART_ITERATIONS:-800}
steps=$((iterations * 3 / 40))
source examples/quickstart_steps.sh

environment

mkdir -p "$out"
rm -rf "$out"/{tokenizer,pretrained,grpo,curves} "$out"/*.jsonl "$out"/text_text_document.* "$out"/{answers.txt,reward.txt,reward.png}

say "2. Texts of sums, prompts to learn from, and prompts to be asked at the end"
run $python examples/grpo/make_data.py "$out"
head -n 3 "$out/text.jsonl"
tokenizer=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$out/tokenizer")
run $python tools/train_tokenizer.py --input "$out/text.jsonl" --vocab-size 257 --output-dir "$out/tokenizer"
run $python tools/preprocess_data.py --input "$out/text.jsonl" --output-prefix "$out/text" "${tokenizer[@]}" --append-eod

say "3. Pretraining on the texts"
run $python pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 \
    --position-embedding-type rope --normalization RMSNorm --swiglu --attention-dropout 0 --hidden-dropout 0 \
    --data-path "$out/text_text_document" --split 1,0,0 --packing best-fit "${tokenizer[@]}" --num-workers 0 \
    --micro-batch-size 32 --global-batch-size 32 --train-iters "$iterations" --lr 4e-3 --min-lr 3e-4 \
    --lr-warmup-iters 20 --eval-iters 0 --log-interval "$((iterations / 10))" --save "$out/pretrained"

say "4. GRPO: 16 answers to each of 16 sums at a time, a step on them"
run $python pretrain_gpt.py --pretrained-checkpoint "$out/pretrained" --use-checkpoint-args "${tokenizer[@]}" \
    --perform-rl-step --grpo-prompts "$out/prompts.jsonl" --reward-function examples/grpo/rewards.py:right_sum \
    --grpo-prompts-per-step 16 --grpo-group-size 16 --grpo-iterations 1 --grpo-max-new-tokens 4 --grpo-kl-beta 0 \
    --grpo-clamp-eps-lower 0.2 --grpo-clamp-eps-upper 0.2 --seq-length 8 --micro-batch-size 256 --global-batch-size 256 \
    --train-iters "$steps" --lr 1e-3 --min-lr 1e-4 --lr-decay-style linear \
    --lr-warmup-iters "$((steps / 12))" --num-workers 0 --log-interval 10 \
    --grpo-eval-prompts "$out/held_out.jsonl" --grpo-eval-temperature 1 --eval-interval "$(((steps + 9) / 10))" \
    --save "$out/grpo" --tensorboard-dir "$out/curves"

say "5. Ten answers of both models to each sum that GRPO had no prompt of"
for model in pretrained grpo; do
    run $python tools/text_generation_cli.py --load "$out/$model" --input-jsonl "$out/held_out.jsonl" \
        --output-jsonl "$out/$model.jsonl" --tokens-to-generate 4 --temperature 1
done
keep "$out/answers.txt" $python examples/grpo/rewards.py "$out/pretrained.jsonl" "$out/grpo.jsonl"

say "6. The reward as a picture"
keep "$out/reward.txt" $python tools/plot_loss.py "$out/curves" --curve reward --output "$out/reward.png" \
    --title "Share of right sums: of prompts that are learned from, and of held-out ones"

say "Done in $((SECONDS / 60)) min $((SECONDS % 60)) s"
echo
cat "$out/answers.txt"
cat <<END

  model     $out/grpo
  answers   $out/grpo.jsonl
  curve     $out/reward.png
END
