#!/usr/bin/env bash
# From text files to an assistant, on two CPU cores: bash examples/assistant/quickstart.sh
#
# About seven minutes on two cores, and installing the first time. Nothing is downloaded but packages: the text is the
# English that every Python carries, and the questions are made from it. Each command is printed as you would
# type it, from the repository's root. Everything it makes lies in runs/assistant and .venv.
#
# Expect a table in which instruction tuning raises right answers from 0 to about 95 of 100, half of them after filler
# words, and training on preferences removes these words from all of them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

out=${QUICKSTART_DIR:-runs/assistant}
iterations=${QUICKSTART_ITERATIONS:-1600}
source examples/quickstart_steps.sh

environment ", the gguf package and llama.cpp" gguf "gguf tokenizers xllamacpp" \
    .venv/bin/pip install --quiet xllamacpp

mkdir -p "$out"
rm -rf "$out"/{corpus,chats,tokenizer,data,pretrained,chat,preferred,gguf} "$out"/answers.txt

corpus

say "3. Tokenizer: a byte-level BPE of 4,096 tokens, two of which mark turns"
run $python tools/train_tokenizer.py --input "$out/corpus/train.jsonl" --vocab-size 4096 \
    --special-tokens '<|im_start|>' '<|im_end|>' --output-dir "$out/tokenizer"

say "4. Questions and answers, and token files"
run $python examples/assistant/make_chats.py --corpus "$out/corpus/train.jsonl" --output-dir "$out/chats"
tokenizer=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$out/tokenizer")
for part in train heldout; do
    run $python tools/preprocess_data.py --input "$out/corpus/$part.jsonl" --output-prefix "$out/data/$part" \
        "${tokenizer[@]}" --append-eod --workers 2
done
run $python tools/preprocess_sft.py --input "$out/chats/chats.jsonl" --output-prefix "$out/data/chats" "${tokenizer[@]}"
run $python tools/preprocess_preferences.py --input "$out/chats/preferences.jsonl" --output-prefix "$out/data/preferences" \
    "${tokenizer[@]}"

ranks=(.venv/bin/torchrun --standalone --nproc_per_node=2 pretrain_gpt.py --distributed-backend gloo)
schedule=(--lr-decay-style cosine --lr-warmup-fraction 0.05 --weight-decay 0.1 --adam-beta2 0.95)

say "5. Pretraining on two ranks"
run "${ranks[@]}" --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 \
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear \
    --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.05 \
    --train-data-path "$out/data/train_text_document" --valid-data-path "$out/data/heldout_text_document" "${tokenizer[@]}" \
    --micro-batch-size 8 --global-batch-size 16 --train-iters "$iterations" --lr 4e-3 --min-lr 4e-4 "${schedule[@]}" \
    --log-interval "$((iterations / 8))" --eval-interval "$iterations" --eval-iters 4 \
    --save "$out/pretrained" --save-interval "$iterations"

tune() { # tune FROM TO FLAGS...: train the model in $out/FROM further, into $out/TO
    local from=$1 to=$2
    shift 2
    run "${ranks[@]}" --load "$out/$from" --use-checkpoint-args --finetune --save "$out/$to" "${tokenizer[@]}" \
        --split 1,0,0 --eval-iters 0 --micro-batch-size 4 --global-batch-size 8 "${schedule[@]}" "$@"
}

say "6. Instruction tuning: loss on answers only"
tune pretrained chat --data-path "$out/data/chats" --sft --packing best-fit --lr 2e-3 --min-lr 1e-4 \
    --train-iters "$iterations" --log-interval "$((iterations / 8))" --save-interval "$iterations"

say "7. Preferences (DPO): the answer that comes to the point is the better one"
tune chat preferred --data-path "$out/data/preferences" --preference-loss dpo --preference-sft-weight 1 --lr 1e-4 --min-lr 1e-5 \
    --train-iters "$((iterations / 16))" --log-interval "$((iterations < 160 ? 1 : iterations / 80))" --save-interval "$iterations"

say "8. The last model as a GGUF file of eight bits, which llama.cpp runs"
run $python tools/checkpoint/convert.py --from megatron --load "$out/preferred" --to gguf --gguf-type q8_0 --save "$out/gguf"

say "9. After each step: questions that were in no training data, and the perplexity of text"
keep "$out/answers.txt" $python examples/assistant/ask.py --questions "$out/chats/heldout.jsonl" \
    --text "$out/corpus/heldout.jsonl" pretrained="$out/pretrained" chat="$out/chat" preferred="$out/preferred" \
    llama.cpp="$out/gguf/gguf-Q8_0.gguf"

say "Done in $((SECONDS / 60)) min $((SECONDS % 60)) s"
cat <<END

  checkpoints   $out/pretrained, $out/chat, $out/preferred
  table         $out/answers.txt
  GGUF file     $out/gguf/gguf-Q8_0.gguf

Talk to it in a browser, at http://localhost:5000/:
  $python tools/run_text_generation_server.py --load '$out/preferred' --port 5000
END
