#!/usr/bin/env bash
# All checks, then all tests but those marked slow; arguments go to pytest: bash tests/run.sh tests/unit -k rotary
# With --slow SECONDS the slow tests alone, without the checks; those that time is too short for are listed.
# Makes .venv when there is none. TEST_WORKERS sets the number of test processes (default 2).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
started=$SECONDS

step() { # step NAME COMMAND...: prints the name and how long it took, and on failure which check failed
    local name=$1 began=$SECONDS
    shift
    echo "== $name"
    "$@" || { echo "tests/run.sh: FAILED at: $name (after $((SECONDS - started)) s)" >&2; exit 1; }
    echo "   $((SECONDS - began)) s"
}

export OMP_NUM_THREADS=1 # tests share few cores, and results must repeat
export PYTHONDONTWRITEBYTECODE=
bin=.venv/bin

step "environment" bash tools/make_venv.sh dev-all
if [[ " $* " != *" --slow"* ]]; then
    step "format (ruff format .)" $bin/ruff format --check --quiet .
    step "lint (ruff check .)" $bin/ruff check --quiet .
    step "types (mypy --strict)" $bin/mypy --no-error-summary
    step "import layers (import-linter)" $bin/lint-imports --no-logo
fi
step "tests (pytest)" $bin/python -m pytest -q -n "${TEST_WORKERS:-2}" --dist worksteal --durations=10 --durations-min=5 "$@"
echo "tests/run.sh: everything passed in $((SECONDS - started)) s"
