#!/usr/bin/env bash
# A model that reads pictures, on two CPU cores: bash examples/vision_language/quickstart.sh
#
# About five minutes on two cores. The pictures are real: pairs of scanned digits that scikit-learn carries. A small
# language model first learns from texts alone; then a projector learns to hand it an encoder's features, while both stay
# as they are; then all of it is trained, on captions and questions. Everything it makes lies in
# runs/vision_language and .venv.
#
# Expect scores near chance of the model of texts, little better ones of the projector alone, as its encoder is a random
# one and it has seen no questions, and a last model that reads nine of ten pairs of digits that no training picture has.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

out=${QUICKSTART_DIR:-runs/vision_language}
iterations=${QUICKSTART_ITERATIONS:-600}
source examples/quickstart_steps.sh

environment ", Pillow and scikit-learn's digits" images "PIL sklearn" \
    .venv/bin/pip install --quiet --no-deps scikit-learn -c constraints.txt

mkdir -p "$out"
rm -rf "$out"/{digits,tokenizer,data,texts,projector,trained} "$out"/{texts,projector,trained,captions}.txt "$out"/{answers,answers.png,sample.png}

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

say "9. Captions and answers about pictures of digits that no training picture has, also asked without the pictures"
asked=("$out"/digits/heldout_{captions,left,right,larger}.jsonl)
for model in texts projector trained; do
    keep "$out/$model.txt" $python tasks/main.py --task VQA --load "$out/$model" --valid-data "${asked[@]}" --without-images \
        --tokens-to-generate 8 --micro-batch-size 100 --predictions-dir "$out/answers/$model"
done
keep "$out/captions.txt" $python tasks/main.py --task CAPTION --load "$out/trained" --valid-data "${asked[0]}" \
    --without-images --tokens-to-generate 8 --micro-batch-size 100
run $python examples/vision_language/draw_answers.py "$out"/answers/trained/*.jsonl --image-folder "$out/digits" \
    --output "$out/answers.png"

say "Done in $((SECONDS / 60)) min $((SECONDS % 60)) s"
cat <<END

  checkpoints   $out/texts, $out/projector, $out/trained
  scores        $out/texts.txt, $out/projector.txt, $out/trained.txt, $out/captions.txt
  answers       $out/answers
  pictures      $out/sample.png, $out/answers.png
END
