#!/usr/bin/env bash
# The tests on a real control plane, in two halves side by side: most of their time is waiting. Each has a network, a
# control plane and a log of its own; the second's is shown when it has ended. FILES...: only those.
set -uo pipefail
cd "$(dirname "$0")/.."
python=$PWD/.venv/bin/python

halves=([0]="" [1]="")
number=0
[ $# -gt 0 ] || set -- tests/cluster/test_*.py
for file in "$@"; do
  halves[$((number++ % 2))]+=" $file"
done

half() {  # FILES...
  "$python" -m tests.cluster.network "$python" -m pytest -p no:xdist "$@"
}

log=$(mktemp)
trap 'rm -f "$log"' EXIT
# shellcheck disable=SC2086  # names of files without spaces
half ${halves[1]} >"$log" 2>&1 &
second=$!
# shellcheck disable=SC2086
half ${halves[0]}
first=$?
wait "$second"
second=$?
cat "$log"
exit "$((first ? first : second))"
