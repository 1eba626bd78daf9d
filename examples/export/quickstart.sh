#!/usr/bin/env bash
# The quickstart's model as GGUF files of eight and of four bits, run by llama.cpp: bash examples/export/quickstart.sh
#
# A minute on two cores, after bash examples/quickstart.sh. Nothing is downloaded but packages: the gguf package,
# and llama.cpp as a wheel. What it runs is printed as the commands you would type, from the repository's root.
#
# Expect a file of 2.2 MB with Q8_0, where the weights in fp32 have 7.2 MB, and one of 1.8 MB with Q4_0, both with about
# the perplexity of the checkpoint: 111.3 became 111.4 and 112.0.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

from=${QUICKSTART_DIR:-runs/quickstart}
out=${EXPORT_DIR:-runs/export}
tokens=${EXPORT_TOKENS:-1000}
source examples/quickstart_steps.sh

environment ", the gguf package and llama.cpp" gguf "gguf tokenizers xllamacpp" \
    .venv/bin/pip install --quiet xllamacpp

if [[ ! -d $from/checkpoints ]]; then
    echo "there is no model in $from: train one first with bash examples/quickstart.sh"
    exit 2
fi
mkdir -p "$out"
rm -rf "$out"/{q8_0,q4_0} "$out"/{answers.txt,perplexity.txt}

say "2. The checkpoint as GGUF files, each run by llama.cpp before it gets its name"
for kind in q8_0 q4_0; do
    run $python tools/checkpoint/convert.py --from megatron --load "$from/checkpoints" --to gguf --gguf-type "$kind" \
        --save "$out/$kind"
done

say "3. Text from llama.cpp, and its perplexity on documents that were kept out of training, beside ours"
keep "$out/answers.txt" $python examples/export/run_llama_cpp.py --checkpoint "$from/checkpoints" \
    --text "$from/corpus/heldout.jsonl" --tokens "$tokens" --prompt "Return a new" \
    "$out/q8_0/q8_0-Q8_0.gguf" "$out/q4_0/q4_0-Q4_0.gguf"

say "Done in $((SECONDS / 60)) min $((SECONDS % 60)) s"
cat <<END

  files    $out/q8_0/q8_0-Q8_0.gguf
           $out/q4_0/q4_0-Q4_0.gguf
  figures  $out/answers.txt

Ollama takes such a file by a Modelfile with the line FROM ./q8_0-Q8_0.gguf; docs/export.md has the commands of other programs.
END
