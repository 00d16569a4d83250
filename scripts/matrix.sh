#!/bin/sh
# Runs the tests that talk to Slurm on several versions of it at once: `matrix.sh 24.11 26.05`.
#
# They wait far more than they compute. Each version's output is shown as a whole
# when it is there; ARGS in the environment are further arguments for pytest.
set -u

cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

run() {
    # shellcheck disable=SC2086 # several words
    STEWARD_SLURM=${1#installed} .venv/bin/pytest tests/integration -n 2 --dist loadfile \
        -m "matrix and not long" ${ARGS:-} >"$work/$1.log" 2>&1
    echo $? >"$work/$1.code"
}

for version in "$@"; do
    run "$version" &
done
wait

failed=
for version in "$@"; do
    printf '==> Slurm %s\n' "$version"
    cat "$work/$version.log"
    [ "$(cat "$work/$version.code")" = 0 ] || failed="$failed $version"
done
if [ -n "$failed" ]; then
    printf 'failed on Slurm%s\n' "$failed" >&2
    exit 1
fi
