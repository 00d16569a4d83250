#!/bin/bash
# Runs groups of tests side by side: `test.sh "not long" unit long @24.11`.
#
# Some compute and most wait, so together they take little longer than the longest of
# them; too many at a time would wait for each other past their time-outs, so that only so
# many processes run at once, in the order given. Each argument is pytest's -m for one group
# of integration tests, or stands for the unit tests, or, as @24.11, for the tests that talk
# to Slurm, on that version of it, or, as older-search, for those of search servers, on their
# older majors. The first one's tests, the most, are run by two processes, with a cluster each,
# as are those of a version, and the unit tests. The first one's output is shown as it
# comes, that of the others as a whole when all have ended. ARGS in the environment are
# further arguments.
set -u

most=5 # six ran into time-outs on two processors

cd "$(dirname "$0")/.."
work=$(mktemp -d)
started=()
declare -A processes=()
trap 'rm -rf "$work"' EXIT
trap 'kill "${started[@]}"; exit 130' INT
trap 'kill "${started[@]}"; exit 143' TERM

run() {
    # shellcheck disable=SC2086 # several words
    exec .venv/bin/pytest "$@" ${ARGS:-}
}

# has_room COUNT: whether so many processes more may run now.
has_room() {
    local sum=$1 pid running
    mapfile -t running < <(jobs -rp)
    for pid in "${running[@]}"; do
        sum=$((sum + ${processes[$pid]:-0}))
    done
    ((sum <= most))
}

# beside NAME COUNT ARGUMENT...: pytest, in so many processes, when there is room for it.
beside() {
    local name=$1 count=$2
    shift 2
    until has_room "$count"; do
        sleep 1
    done
    run "$@" >"$work/$name" 2>&1 &
    started+=($!)
    processes[$!]=$count
}

run tests/integration -n 2 --dist loadfile -m "$1" &
started+=($!)
processes[$!]=2
shift
group=0
for marks in "$@"; do
    group=$((group + 1))
    if [ "$marks" = unit ]; then
        beside "$group" 2 tests/unit -n 2 --dist loadfile
    elif [ "${marks#@}" != "$marks" ]; then
        export STEWARD_SLURM=${marks#@}
        beside "$group" 2 tests/integration -n 2 --dist loadfile -m "matrix and not long"
        unset STEWARD_SLURM
    elif [ "$marks" = older-search ]; then
        export STEWARD_ELASTICSEARCH=8 STEWARD_OPENSEARCH=2
        beside "$group" 1 tests/integration -m search
        unset STEWARD_ELASTICSEARCH STEWARD_OPENSEARCH
    else
        beside "$group" 1 tests/integration tests/browser -m "$marks"
    fi
done

codes=
for process in "${started[@]}"; do
    wait "$process"
    codes="$codes $?"
done
for output in "$work"/*; do
    cat "$output"
done

# Code 5 says that no test was chosen, as ARGS='-k spool' may have it for some of the groups.
for code in $codes; do
    case $code in
    0 | 5) ;;
    *) printf 'some tests failed: pytest ended with the codes%s\n' "$codes" >&2 && exit 1 ;;
    esac
done
