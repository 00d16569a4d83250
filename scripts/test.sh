#!/bin/sh
# Runs the unit tests and groups of integration tests side by side: `test.sh "not long" long`.
#
# Some compute and most wait, so together they take little longer than the longest of
# them. Each argument is pytest's -m for one group; the first one's tests, the most, are
# run by two processes, with a cluster each, and its output is shown as it comes, that of
# the others as a whole when all have ended. ARGS in the environment are further arguments.
set -u

cd "$(dirname "$0")/.."
work=$(mktemp -d)
running=
trap 'rm -rf "$work"' EXIT
trap 'kill $running; exit 130' INT
trap 'kill $running; exit 143' TERM

run() {
    # shellcheck disable=SC2086 # several words
    .venv/bin/pytest "$@" ${ARGS:-}
}

run tests/unit >"$work/0" 2>&1 &
running=$!
first=$1
shift
group=0
for marks in "$@"; do
    group=$((group + 1))
    run tests/integration tests/browser -m "$marks" >"$work/$group" 2>&1 &
    running="$running $!"
done

run tests/integration -n 2 --dist loadfile -m "$first"
codes=$?
for process in $running; do
    wait "$process"
    codes="$codes $?"
done
cat "$work"/*

# Code 5 says that no test was chosen, as ARGS='-k spool' may have it for some of the groups.
for code in $codes; do
    case $code in
    0 | 5) ;;
    *) printf 'some tests failed: pytest ended with the codes %s\n' "$codes" >&2 && exit 1 ;;
    esac
done
