#!/usr/bin/env bash
# LAMBADA: how often the last word of a passage is predicted, which takes all of its context.
#
#   LOAD=runs/gpt2_124m bash examples/evaluate/lambada.sh                one GPU, or the CPU where there is none
#   LOAD=runs/gpt2_124m TP=2 PP=2 bash examples/evaluate/lambada.sh      four; the same score
#   ... --dry-run                                                        check only
#
# LOAD  folder of checkpoints of a GPT, saved at any layout; it knows architecture and tokenizer.
# DATA  lambada_test.jsonl, JSON lines with "text", 5,153 passages as they were made for GPT-2.
# Without --strict-lambada only the last token counts, which may be a piece of a word.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

tp=${TP:-1} pp=${PP:-1}
export GPUS_PER_NODE="${GPUS_PER_NODE:-$((tp * pp))}"
exec bash examples/launch.sh tasks/main.py --task LAMBADA --strict-lambada --load "${LOAD:-runs/gpt2_124m}" \
    --tensor-model-parallel-size "$tp" --pipeline-model-parallel-size "$pp" \
    --valid-data "${DATA:-data/lambada/lambada_test.jsonl}" --micro-batch-size 16 \
    --result-file "${RESULT:-runs/lambada.json}" "$@"
