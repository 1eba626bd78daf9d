#!/usr/bin/env bash
# What the quickstarts have in common, sourced by them with the run's folder in $out: commands that are shown as they run,
# an environment, a corpus, a picture.
set -euo pipefail
cores=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores >= 4 ? cores / 2 : 1))} # two ranks share the cores
python=.venv/bin/python

say() { # a heading
    printf '\n\033[1m== %s\033[0m\n' "$*"
}

show() { # a command as one would type it
    local word line='$' indent='' plain='^[A-Za-z0-9_./:=,@%+|-]+$'
    for word in "$@"; do
        [[ $word =~ $plain ]] || word="'$word'"
        if [[ $word == --* && ${#line} -gt 60 ]]; then
            printf '%s \\\n' "$indent$line"
            line=$word indent='      '
        else
            line="$line $word"
        fi
    done
    printf '%s\n' "$indent$line"
}

run() { # show a command, then run it
    show "$@"
    "$@"
}

keep() { # keep FILE COMMAND...: run, and keep what it prints
    local file=$1
    shift
    show "$@" "|" tee "$file"
    "$@" | tee "$file"
}

environment() { # .venv with this project and what a quickstart needs: [WORDS EXTRA "MODULES" [COMMAND...]]
    local words=${1:-} extra=${2:-plot} modules=${3:-"matplotlib tensorboard tokenizers"}
    shift $(($# < 3 ? $# : 3))
    say "1. Environment: .venv with this project$words"
    # shellcheck disable=SC2086 # modules are words
    if $python -c "import sys, importlib.util as of; sys.exit(not all(map(of.find_spec, sys.argv[1:])))" \
        megatron torch $modules 2>/dev/null; then
        echo ".venv is there and has everything"
    else
        run bash tools/make_venv.sh "$extra"
        (($# == 0)) || run "$@"
    fi
}

corpus() { # text in $out/corpus
    say "2. Corpus: documentation, docstrings and comments of the standard library, as JSON lines"
    run $python tools/make_stdlib_corpus.py --output-dir "$out/corpus"
}

tokens() { # a byte-level BPE of $1 tokens in $out/tokenizer, its flags in $tokenizer, and texts in $out/data
    say "3. Tokenizer: a byte-level BPE of ${1%???},${1: -3} tokens"
    run $python tools/train_tokenizer.py --input "$out/corpus/train.jsonl" --vocab-size "$1" --output-dir "$out/tokenizer"
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
}

pieces() { # vocabulary in $out/tokenizer, and texts in $out/data with the flags of a tokenizer that are given
    say "3. Tokenizer: WordPiece of 2,048 pieces"
    run $python tools/train_tokenizer.py --kind wordpiece --input "$out/corpus/train.jsonl" --vocab-size 2048 \
        --output-dir "$out/tokenizer"
    say "4. Token files, sentence by sentence"
    for part in train heldout; do
        run $python tools/preprocess_data.py --input "$out/corpus/$part.jsonl" --output-prefix "$out/data/$part" \
            "$@" --split-sentences --workers 2
    done
}

picture() { # the loss curve of $out/tensorboard, with the title that is given
    keep "$out/loss.txt" $python tools/plot_loss.py "$out/tensorboard" --output "$out/loss.png" --title "$1"
}

sample() { # $1 tokens of text from the model in $out/checkpoints, after each of three beginnings
    keep "$out/sample.txt" $python tools/text_generation_cli.py --load "$out/checkpoints" --tokens-to-generate "$1" \
        --temperature 0.8 --top-p 0.9 --prompt "Return a new" "The following example" "Raises an exception if"
}

result() { # how long it took, and how far the loss fell
    say "Done in $((SECONDS / 60)) min $((SECONDS % 60)) s"
    sed -n '1s/^[^:]*: /The loss fell: /p' "$out/loss.txt"
}

places() { # where everything is; NAME FILE... for what only one quickstart makes
    cat <<END

  checkpoints   $out/checkpoints
  TensorBoard   $out/tensorboard  (.venv/bin/tensorboard --logdir '$out/tensorboard')
  loss curve    $out/loss.png
END
    while (($#)); do
        printf '  %-13s %s\n' "$1" "$out/$2"
        shift 2
    done
    echo
}

more_text() { # how to get more text from the model
    echo "More of its text: $python tools/text_generation_cli.py --load '$out/checkpoints'"
}

summary() { # what a model of missing words has come to: the tool of tools/ that shows more, what guessing costs
    result
    echo "$2"
    places words filled.txt
    echo "More words: $python tools/$1 --load '$out/checkpoints' --text 'The [MASK] is read from a file.'"
}
