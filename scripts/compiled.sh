#!/usr/bin/env bash
# Builds the wheel with the compiled gateway (hatch_build.py). Without arguments: unpacks it into build/compiled, if a
# source has changed since. `wheel FOLDER`: copies it there. `test OPTIONS`: also runs the gateway's tests against it.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$PWD/.venv/bin/python
packages=(artifacts autoscaler gateway loadtest pilotlight)

include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
cc=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("CC").split()[0])')
if ! command -v "$cc" >/dev/null || [ ! -e "$include/Python.h" ]; then
  echo "compiled gateway: skipped, because it needs $cc and $include/Python.h (Debian: apt install gcc python3-dev)"
  [ "${1:-}" = wheel ] && exit 1
  exit 0
fi

build() {  # FOLDER
  rm -rf "$1"
  echo "compiling the gateway: about a minute, unless the cache has it"
  local cache=
  if [ "$1" = build/wheel-cached ]; then  # only for tests and benchmarks; a wheel for users is always compiled
    cache=${XDG_CACHE_HOME:-$HOME/.cache}/pilotlight
    mkdir -p "$cache"
  fi
  COMPILED_CACHE=$cache HATCH_BUILD_HOOK_ENABLE_CUSTOM=1 "$python" -m build --wheel --no-isolation --outdir "$1" . >build/compiled.log 2>&1 ||
    { tail -n 30 build/compiled.log >&2; exit 1; }
}

mkdir -p build
if [ "${1:-}" = wheel ]; then
  build build/wheel
  mkdir -p "$2"
  rm -f "$2"/pilotlight-*.whl
  cp build/wheel/*.whl "$2"
  ls "$2"/pilotlight-*.whl
  exit
fi

place=$PWD/build/compiled
if [ ! -e "$place/ready" ] || [ -n "$(find "${packages[@]}" hatch_build.py pyproject.toml -newer "$place/ready" -name '*.*' ! -name '*.pyc' -print -quit)" ]; then
  build build/wheel-cached
  rm -rf "$place"
  "$python" -m zipfile -e build/wheel-cached/*.whl "$place"
  "$python" -m compileall -q "$place"  # as an installer does: start times are measured
  touch "$place/ready"
fi
[ "${1:-}" = test ] || exit 0

logs=$PWD/build/test-logs
tested=$PWD/build/tested/compiled  # not next to the packages: benchmarks would import this copy instead of the project's tests
rm -rf "$tested"
mkdir -p "$tested"
cp -r tests scripts pyproject.toml "$tested"
cd "$tested"
shift
# Not tests/unit/gateway/http/test_response_reader.py: its fake Sink cannot derive from a compiled class. tests/wire covers
# the same compiled code.
PYTHONPATH=$place:$tested exec "$python" -m pytest --dist loadgroup --rootdir . --compiled --failure-logs="$logs" "$@" tests/wire tests/fuzz tests/integration/process/clients/test_openai_and_anthropic.py \
  tests/project/test_compiled.py \
  tests/property/test_dispatcher.py \
  tests/property/test_messages_translation.py \
  tests/property/test_responses_translation.py \
  tests/property/test_triton_translation.py \
  tests/unit/gateway/control/test_sync.py \
  tests/unit/gateway/dispatch/test_dispatcher.py \
  tests/unit/gateway/dispatch/test_fair_queue.py \
  tests/unit/gateway/dispatch/test_reports.py \
  tests/unit/gateway/dispatch/test_routing_table.py \
  tests/unit/gateway/dispatch/test_slots.py \
  tests/unit/gateway/http/test_host_check.py \
  tests/unit/gateway/http/test_response_reader_walk.py \
  tests/unit/gateway/http/test_sse_relay.py \
  tests/unit/gateway/memory/test_body_budget.py \
  tests/unit/gateway/memory/test_memory_sampler.py \
  tests/unit/gateway/request/test_api_routes.py \
  tests/unit/gateway/request/test_auth.py \
  tests/unit/gateway/request/test_body_members.py \
  tests/unit/gateway/request/test_headers.py \
  tests/unit/gateway/request/test_json_scanner.py \
  tests/unit/gateway/request/test_multipart.py \
  tests/unit/gateway/test_telemetry.py \
  tests/unit/loadtest/report/test_report.py \
  tests/unit/loadtest/test_response_reader.py \
  tests/unit/pilotlight/cli/test_main.py
