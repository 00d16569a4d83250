#!/bin/sh
# Runs unit and integration tests side by side: `test.sh "not long and not servers"`.
#
# The ones compute and the others wait, so together they take little longer than
# the longer of the two. The unit tests' output is shown as a whole at the end.
# The one argument is pytest's -m; ARGS in the environment are further arguments.
set -u

cd "$(dirname "$0")/.."
log=$(mktemp)
trap 'rm -f "$log"' EXIT
unit=
trap 'kill $unit; exit 130' INT
trap 'kill $unit; exit 143' TERM

# shellcheck disable=SC2086 # several words
.venv/bin/pytest tests/unit ${ARGS:-} >"$log" 2>&1 &
unit=$!
# shellcheck disable=SC2086
.venv/bin/pytest tests/integration -m "$1" ${ARGS:-}
integration=$?
wait "$unit"
unit=$?
cat "$log"

# Code 5 says that no test was chosen, as ARGS='-k spool' may have it for one of the two.
case "$unit $integration" in
'5 5') printf 'no test was chosen\n' >&2 && exit 5 ;;
[05]' '[05]) exit 0 ;;
*) printf 'failed: unit tests with code %s, integration tests with %s\n' "$unit" "$integration" >&2 && exit 1 ;;
esac
