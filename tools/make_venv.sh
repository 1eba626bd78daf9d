#!/usr/bin/env bash
# Make .venv, or bring it up to date, with this project and the extras named: tools/make_venv.sh dev
# Does nothing when setup.py and constraints.txt are as they were. PYTHON names another interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extras=$(IFS=,; echo "$*")
stamp=".venv/.installed-${extras:-plain}"

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: no Python 3.10 or newer with the venv module among ${PYTHON:-python3.11 python3.12 python3.13 python3};" \
         "install one, or name it: PYTHON=/path/to/python bash $0" >&2
    return 1
}

if ! .venv/bin/python -c '' 2>/dev/null; then
    python=$(find_python)
    echo "making .venv with $("$python" --version)"
    rm -rf .venv
    "$python" -m venv .venv
fi

# Constraints name releases that need Python 3.11; on 3.10 pip chooses for itself.
constraints=(-c constraints.txt)
if ! .venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then constraints=(); fi

wanted=$(cat setup.py constraints.txt | .venv/bin/python -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')
if [ "$(cat "$stamp" 2>/dev/null || true)" != "$wanted" ]; then
    echo "installing pretrain-megatron${extras:+[$extras]} into .venv (the first time takes a few minutes)"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -e ".${extras:+[$extras]}" ${constraints[@]+"${constraints[@]}"}
    echo "$wanted" >"$stamp"
fi
