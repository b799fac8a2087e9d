#!/usr/bin/env bash
# Installs the peers that are Python packages, each in a virtual environment of its own: bench/peers.sh [DIR]
# bench-dataplane looks for them in BENCH_PEERS, which has the same default. nginx, HAProxy and wrk are Debian packages.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=${1:-${BENCH_PEERS:-${XDG_CACHE_HOME:-$HOME/.cache}/pilotlight/peers}}
python=${PYTHON:-.venv/bin/python}  # theirs and ours run on the same interpreter
mkdir -p "$folder"
for package in vllm-router==0.1.17 sglang-router==0.3.2 'litellm[proxy]==1.106.2'; do
  place=$folder/${package%%[=\[]*}
  echo "installing $package into $place"
  "$python" -m venv --clear "$place"
  "$place/bin/python" -m pip install --quiet --disable-pip-version-check "$package"
done
echo "done; elsewhere than in the default folder say BENCH_PEERS=$folder"
