#!/usr/bin/env bash
# A model that reads pictures, on two CPU cores: bash examples/vision_language/quickstart.sh
#
# About five minutes on two cores. The pictures are real: pairs of scanned digits that scikit-learn carries. A small
# language model first learns from texts alone; then a projector learns to hand it an encoder's features, while both stay
# as they are; then all of it is trained, on captions and questions. Everything it makes lies in
# runs/vision_language and .venv.
#
# Expect a table in which the model of texts guesses, the projector alone does little better, as its encoder is a random
# one and it has seen no questions, and the last model reads nine of ten pairs of digits that no training picture has.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

out=${QUICKSTART_DIR:-runs/vision_language}
iterations=${QUICKSTART_ITERATIONS:-600}
source examples/quickstart_steps.sh

environment ", Pillow and scikit-learn's digits" images "PIL sklearn" \
    .venv/bin/pip install --quiet --no-deps scikit-learn -c constraints.txt

mkdir -p "$out"
rm -rf "$out"/{digits,tokenizer,data,texts,projector,trained} "$out"/{answers.txt,answers.png,sample.png}

say "2. Pictures of two scanned digits each, captions and questions"
run $python examples/vision_language/make_digits.py --output-dir "$out/digits"

say "3. Tokenizer: a byte-level BPE of 300 tokens, two of which mark turns"
run $python tools/train_tokenizer.py --input "$out/digits/train_texts.jsonl" --vocab-size 300 \
    --special-tokens '<|im_start|>' '<|im_end|>' --output-dir "$out/tokenizer"
tokenizer=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$out/tokenizer")

say "4. Token files: every picture is checked, and stays where it is"
vision=(--vision-model-type siglip --img-h 8 --img-w 16 --patch-dim 2)
for part in train_captions train_questions heldout_captions train_texts; do
    run $python tools/preprocess_images.py --input "$out/digits/$part.jsonl" --output-prefix "$out/data/$part" \
        "${tokenizer[@]}" "${vision[@]}"
done

train() { # train TO ITERATIONS FLAGS...: train into $out/TO
    local to=$1 count=$2
    shift 2
    run .venv/bin/torchrun --standalone --nproc_per_node=2 pretrain_vlm.py --distributed-backend gloo \
        --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --position-embedding-type rope \
        --normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.1 \
        "${vision[@]}" --vision-num-layers 2 --vision-hidden-size 64 --vision-num-attention-heads 4 --vision-ffn-hidden-size 256 \
        "${tokenizer[@]}" --sft --packing best-fit --micro-batch-size 16 --global-batch-size 32 \
        --lr-decay-style cosine --lr-warmup-fraction 0.05 --weight-decay 0.1 --adam-beta2 0.95 --min-lr 1e-4 \
        --train-iters "$count" --log-interval "$((count < 8 ? 1 : count / 8))" --save "$out/$to" --save-interval "$count" "$@"
}

say "5. The language model, from texts alone"
train texts "$((iterations / 6))" --data-path "$out/data/train_texts" --split 1,0,0 --eval-iters 0 --lr 4e-3

say "6. A sample as the training reads it"
run $python tools/inspect_dataset.py --model-type VLM --sample 0 --picture "$out/sample.png" --load "$out/texts" \
    --use-checkpoint-args --data-path "$out/data/train_captions" --split 1,0,0 --sft --packing best-fit "${tokenizer[@]}" \
    --micro-batch-size 1 --train-iters 1 --lr 1e-3

say "7. First stage: the projector alone, from captions"
train projector "$((iterations / 4))" --load "$out/texts" --finetune --freeze-LM --freeze-ViT --lr 8e-3 \
    --data-path "$out/data/train_captions" --split 1,0,0 --eval-iters 0

say "8. Second stage: all of it, from captions and questions"
train trained "$iterations" --load "$out/projector" --finetune --lr 3e-3 \
    --train-data-path 1 "$out/data/train_captions" 1 "$out/data/train_questions" \
    --valid-data-path "$out/data/heldout_captions" --eval-interval "$((iterations / 2))" --eval-iters 4

say "9. Captions and answers about pictures of digits that no training picture has"
keep "$out/answers.txt" $python examples/vision_language/answer.py --picture "$out/answers.png" \
    --questions "$out/digits/heldout_captions.jsonl" "$out/digits/heldout_questions.jsonl" \
    --texts "texts, blind"="$out/texts" -- projector="$out/projector" trained="$out/trained"

say "Done in $((SECONDS / 60)) min $((SECONDS % 60)) s"
cat <<END

  checkpoints   $out/texts, $out/projector, $out/trained
  table         $out/answers.txt
  pictures      $out/sample.png, $out/answers.png
END
