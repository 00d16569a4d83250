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
# Of each group that runs: its number of processes, by the id of its first process.
declare -A running=()
# Of each group that has ended with failures: its name and pytest's exit code.
failed=()
declare -A names=()
trap 'rm -rf "$work"' EXIT
trap 'kill "${!running[@]}"; exit 130' INT
trap 'kill "${!running[@]}"; exit 143' TERM

run() {
    # shellcheck disable=SC2086 # several words
    exec .venv/bin/pytest "$@" ${ARGS:-}
}

# await_group: wait until a group ends, and keep its exit code. At once, because bash forgets
# the code of an ended process as soon as another process gets its id.
await_group() {
    local process code
    wait -n -p process "${!running[@]}"
    code=$?
    unset "running[$process]"
    # Code 5 says that no test was chosen, as ARGS='-k spool' may have it for some of the groups.
    case $code in
    0 | 5) ;;
    *) failed+=("${names[$process]} ($code)") ;;
    esac
}

# has_room COUNT: whether so many processes more may run now.
has_room() {
    local sum=$1 count
    for count in "${running[@]}"; do
        sum=$((sum + count))
    done
    ((sum <= most))
}

# start_group NAME COUNT ARGUMENT...: pytest, in so many processes, when there is room for it.
start_group() {
    local name=$1 count=$2
    shift 2
    until has_room "$count"; do
        await_group
    done
    run "$@" &
    running[$!]=$count
    names[$!]=$name
}

start_group "$1" 2 tests/integration -n 2 --dist loadfile -m "$1"
shift
group=0
for marks in "$@"; do
    group=$((group + 1))
    output=$work/$group
    if [ "$marks" = unit ]; then
        # Before the time-out of pytest, which waits for the interpreter's lock and whose
        # stack traces pytest-xdist drops.
        start_group "$marks" 2 tests/unit -n 2 --dist loadfile -o faulthandler_timeout=290 \
            -o faulthandler_exit_on_timeout=true >"$output" 2>&1
    elif [ "${marks#@}" != "$marks" ]; then
        export STEWARD_SLURM=${marks#@}
        start_group "$marks" 2 tests/integration -n 2 --dist loadfile -m "matrix and not long" >"$output" 2>&1
        unset STEWARD_SLURM
    elif [ "$marks" = older-search ]; then
        export STEWARD_ELASTICSEARCH=8 STEWARD_OPENSEARCH=2
        start_group "$marks" 1 tests/integration -m search >"$output" 2>&1
        unset STEWARD_ELASTICSEARCH STEWARD_OPENSEARCH
    else
        start_group "$marks" 1 tests/integration tests/browser -m "$marks" >"$output" 2>&1
    fi
done

while ((${#running[@]})); do
    await_group
done
for output in "$work"/*; do
    cat "$output"
done

if ((${#failed[@]})); then
    printf 'tests failed, with the exit code of pytest: %s\n' "${failed[@]}" >&2
    exit 1
fi
