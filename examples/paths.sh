#!/usr/bin/env bash
# Sourced by the training examples: reads the paths that may come first, in Megatron-LM's order, into variables.
#
#   paths='CHECKPOINT_PATH TENSORBOARD_LOGS_PATH VOCAB_FILE DATA_PATH'; source examples/paths.sh
#
# A first word that begins with - or @ is a flag: then there are no paths, and the variables are the environment's, if set.
set -euo pipefail

words=()
while [ $# -gt 0 ] && [[ $1 != [-@]* ]]; do
    words+=("$1")
    shift
done
if [ ${#words[@]} -gt 0 ]; then
    read -ra names <<<"$paths"
    if [ ${#words[@]} -ne ${#names[@]} ]; then
        echo "$(basename "$0"): give no path, or all ${#names[@]} ($paths), before the flags; got ${#words[@]}: ${words[*]}" >&2
        exit 2
    fi
    for i in "${!names[@]}"; do
        if [ -z "${words[i]}" ]; then
            echo "$(basename "$0"): ${names[i]}, path $((i + 1)) of ${#names[@]} ($paths), is empty; is its variable set?" >&2
            exit 2
        fi
        printf -v "${names[i]}" %s "${words[i]}"
    done
fi
