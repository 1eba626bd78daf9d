#!/usr/bin/env bash
# All checks and the default tier of the tests; arguments go to pytest: bash tests/run.sh tests/unit -k rotary
# With --all [SECONDS] first the whole tier, in random order; no test begins after SECONDS, and those that did not are listed.
# Makes .venv when there is none. TEST_WORKERS sets the number of test processes (default: one more than cores, at most 9, since
# ranks, servers and disks are waited for).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
started=$SECONDS

step() { # step NAME COMMAND...: prints the name and how long it took, and on failure which check failed
    local name=$1 began=$SECONDS
    shift
    echo "== $name"
    "$@" || { echo "tests/run.sh: FAILED at: $name (after $((SECONDS - started)) s)" >&2; return 1; }
    echo "   $((SECONDS - began)) s"
}

export OMP_NUM_THREADS=1 # tests share few cores, and results must repeat
export PYTHONDONTWRITEBYTECODE=
bin=.venv/bin
cores=$(getconf _NPROCESSORS_ONLN)
pytest=("$bin/python" -m pytest -q -n "${TEST_WORKERS:-$(((cores < 8 ? cores : 8) + 1))}" --dist worksteal --durations=10 --durations-min=5)
if [[ "${1:-}" == --all ]]; then
    shift
    if [[ "${1:-}" =~ ^[0-9]+$ ]]; then pytest+=("--all=$1") && shift; else pytest+=(--all=inf); fi
fi

step "environment" bash tools/make_venv.sh dev-all
if [[ " $* " == *" --without-default "* ]]; then # it follows a run of the default tier, which had the checks
    step "tests (pytest)" "${pytest[@]}" "$@"
else
    step "format (ruff format .)" $bin/ruff format --check --quiet .
    step "lint (ruff check .)" $bin/ruff check --quiet .
    # These take most of a minute on one core: beside the tests they fill the time in which ranks wait for each other.
    log=$(mktemp)
    { $bin/mypy --no-error-summary && $bin/lint-imports --no-logo; } >"$log" 2>&1 &
    checks=$!
    trap 'kill $checks 2>/dev/null || true; rm -f "$log"' EXIT # a failure here would be this script's status
    failed=0
    step "tests (pytest)" "${pytest[@]}" "$@" || failed=1
    step "types (mypy --strict) and import layers (import-linter), beside the tests" wait $checks || failed=1
    cat "$log"
    [ $failed = 0 ] || exit 1
fi
echo "tests/run.sh: everything passed in $((SECONDS - started)) s"
