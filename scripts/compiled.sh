#!/usr/bin/env bash
# The wheel with the gateway compiled (hatch_build.py). Without words: laid open in build/compiled, again only when a
# source has changed. `wheel FOLDER`: put there. `test OPTIONS`: and the gateway's tests run against it.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$PWD/.venv/bin/python
packages=(artifacts autoscaler gateway loadtest pilotlight)

include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
cc=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("CC").split()[0])')
if ! command -v "$cc" >/dev/null || [ ! -e "$include/Python.h" ]; then
  echo "compiled gateway: left out, for it needs $cc and $include/Python.h (Debian: apt install gcc python3-dev)"
  [ "${1:-}" = wheel ] && exit 1
  exit 0
fi

build() {  # FOLDER
  rm -rf "$1"
  echo "compiling the gateway: about a minute, unless an equal one is in the cache"
  local cache=
  if [ "$1" = build/wheel-cached ]; then  # for tests and benches; a wheel for users is built from its sources
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
  "$python" -m compileall -q "$place"  # as an installer does: starts are measured
  touch "$place/ready"
fi
[ "${1:-}" = test ] || exit 0

logs=$PWD/build/test-logs
tested=$PWD/build/tested/compiled  # not beside the packages: benches would find this copy before the project's own tests
rm -rf "$tested"
mkdir -p "$tested"
cp -r tests scripts pyproject.toml "$tested"
cd "$tested"
shift
PYTHONPATH=$place:$tested exec "$python" -m pytest -n 5 --dist loadgroup --rootdir . --compiled --failure-logs="$logs" "$@" tests/wire tests/fuzz tests/process/test_official_clients.py \
  tests/test_{admission,answer,cli,compiled,dialects,dispatch,dispatch_holds,dispatch_machine,multipart,pressure,queue,report}.py \
  tests/test_{reporting,rewrite,room,routes,scan,sse,sync,telemetry,tenants,upstream,walker}.py
