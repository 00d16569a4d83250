#!/bin/bash
# Runs groups of tests side by side: `test.sh 2:unit 2:@24.11 "long and not soak"`.
#
# A group is pytest's -m for integration and browser tests; `unit`, the unit tests; `@24.11`, the
# tests that talk to Slurm, on that version, or `@24.11 interface`, those of them; or `older-search`,
# the tests of search servers on their older majors. "2:" before a group runs it in two processes,
# with a cluster each. As processes become free, the first group starts that needs no more of them:
# give the longest first. The first group's output is shown as it comes, that of the others when all
# have ended. ARGS in the environment are further arguments.
set -u

most=5 # six ran into time-outs on two processors

cd "$(dirname "$0")/.."
work=$(mktemp -d)
# Of each group that runs: its number of processes, by the id of its first process.
declare -A running=()
# Of each group that has ended with failures: its name and pytest's exit code.
failed=()
declare -A names=()
started=0
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

# start_group NAME COUNT ARGUMENT...: start pytest in so many processes.
start_group() {
    local name=$1 count=$2
    shift 2
    ((count == 1)) || set -- "$@" -n "$count" --dist loadfile
    if ((started)); then
        run "$@" >"$work/$started" 2>&1 &
    else
        run "$@" &
    fi
    started=$((started + 1))
    running[$!]=$count
    names[$!]=$name
}

# start_named_group GROUP COUNT: start a group of the command line.
start_named_group() {
    local group=$1 count=$2 which
    case $group in
    unit)
        # Before the time-out of pytest, which waits for the interpreter's lock and whose
        # stack traces pytest-xdist drops.
        start_group "$group" "$count" tests/unit -o faulthandler_timeout=290 \
            -o faulthandler_exit_on_timeout=true
        ;;
    @*)
        read -r STEWARD_SLURM which <<<"${group#@}"
        export STEWARD_SLURM
        start_group "$group" "$count" tests/integration -m "matrix and not long${which:+ and $which}"
        unset STEWARD_SLURM
        ;;
    older-search)
        export STEWARD_ELASTICSEARCH=8 STEWARD_OPENSEARCH=2
        start_group "$group" "$count" tests/integration -m search
        unset STEWARD_ELASTICSEARCH STEWARD_OPENSEARCH
        ;;
    *) start_group "$group" "$count" tests/integration tests/browser -m "$group" ;;
    esac
}

# start_next: start the first of the waiting groups for which there is room; false if there is none.
start_next() {
    local index group count
    for index in "${!waiting[@]}"; do
        group=${waiting[index]}
        count=1
        if [[ $group =~ ^([0-9]+):(.*) ]]; then
            count=${BASH_REMATCH[1]}
            group=${BASH_REMATCH[2]}
        fi
        if has_room "$count"; then
            unset "waiting[$index]"
            start_named_group "$group" "$count"
            return 0
        fi
    done
    return 1
}

waiting=("$@")
while ((${#waiting[@]})); do
    start_next || await_group
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
