#!/bin/bash
# Runs the unit tests and groups of integration tests side by side: `test.sh "not long" long`.
#
# Some compute and most wait, so together they take little longer than the longest of
# them; too many at a time would wait for each other past their time-outs, so of the
# groups beside the first one only so many run at once, in the order given. Each argument
# is pytest's -m for one group; the first one's tests, the most, are run by two processes,
# with a cluster each, and its output is shown as it comes, that of the others as a whole
# when all have ended. ARGS in the environment are further arguments.
set -u

most=3

cd "$(dirname "$0")/.."
work=$(mktemp -d)
started=()
trap 'rm -rf "$work"' EXIT
trap 'kill "${started[@]}"; exit 130' INT
trap 'kill "${started[@]}"; exit 143' TERM

run() {
    # shellcheck disable=SC2086 # several words
    exec .venv/bin/pytest "$@" ${ARGS:-}
}

# beside NAME ARGUMENT...: pytest beside the others, when there is room for it.
beside() {
    local name=$1 running
    shift
    while mapfile -t running < <(jobs -rp) && ((${#running[@]} > most)); do
        sleep 1
    done
    run "$@" >"$work/$name" 2>&1 &
    started+=($!)
}

run tests/integration -n 2 --dist loadfile -m "$1" &
started+=($!)
shift
beside 0 tests/unit
group=0
for marks in "$@"; do
    group=$((group + 1))
    beside "$group" tests/integration tests/browser -m "$marks"
done

codes=
for process in "${started[@]}"; do
    wait "$process"
    codes="$codes $?"
done
cat "$work"/*

# Code 5 says that no test was chosen, as ARGS='-k spool' may have it for some of the groups.
for code in $codes; do
    case $code in
    0 | 5) ;;
    *) printf 'some tests failed: pytest ended with the codes%s\n' "$codes" >&2 && exit 1 ;;
    esac
done
