#!/usr/bin/env bash
# Perplexity on WikiText-103, per token and per word, in windows that overlap so that tokens see a long context.
#
#   LOAD=runs/gpt2_124m bash examples/evaluate/wikitext.sh               one GPU, or the CPU where there is none
#   LOAD=runs/gpt2_124m TP=2 PP=2 bash examples/evaluate/wikitext.sh     four; the same score
#   ... --dry-run                                                        check only
#
# LOAD  folder of checkpoints of a GPT, saved at any layout; it knows architecture and tokenizer.
# DATA  wiki.test.tokens, one text with its words apart; the file is the same for WikiText-2 and WikiText-103.
# Time goes with the number of windows: --overlapping-eval 64 makes half as many, of which each scores 64 tokens.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

tp=${TP:-1} pp=${PP:-1}
export GPUS_PER_NODE="${GPUS_PER_NODE:-$((tp * pp))}"
exec bash examples/launch.sh tasks/main.py --task WIKITEXT103 --load "${LOAD:-runs/gpt2_124m}" \
    --tensor-model-parallel-size "$tp" --pipeline-model-parallel-size "$pp" \
    --valid-data "${DATA:-data/wikitext-103/wiki.test.tokens}" --overlapping-eval 32 --micro-batch-size 8 \
    --result-file "${RESULT:-runs/wikitext.json}" "$@"
