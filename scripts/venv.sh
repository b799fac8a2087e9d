#!/usr/bin/env bash
# Makes .venv with everything in requirements/dev.lock. The distribution's Python comes first, because some self-built
# interpreters are 27 % slower; PYTHON=... names another. One without ensurepip gets its packages from the pip of python3.
set -euo pipefail
cd "$(dirname "$0")/.."

python=""
for candidate in ${PYTHON:-} /usr/bin/python3.13 /usr/bin/python3.12 /usr/bin/python3.11 python3.13 python3.12 python3.11 python3; do
  if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    python=$candidate
    break
  fi
done
[ -n "$python" ] || { echo "Pilotlight needs Python 3.11 or newer; none was found" >&2; exit 1; }

echo "setting up .venv with $("$python" -c 'import sys; print(sys.executable, sys.version.split()[0])')"
rm -rf .venv
if "$python" -c 'import ensurepip' 2>/dev/null; then
  "$python" -m venv .venv
  pip=(.venv/bin/python -m pip)
else
  "$python" -m venv --without-pip .venv
  pip=(python3 -m pip --python .venv/bin/python)
  "${pip[@]}" --version >/dev/null 2>&1 || { echo "neither $python nor python3 has pip: install python3-venv" >&2; exit 1; }
fi
# The lock is complete, and pip cannot match a requirement with an extra to a pinned version; therefore --no-deps.
packages=$(grep -c '^[a-z0-9].*==' requirements/dev.lock || true)
echo "installing up to $packages packages from PyPI: 1 to 2 minutes; after an interruption, complete downloads are reused"
"${pip[@]}" install --disable-pip-version-check --progress-bar off --require-hashes --no-deps -r requirements/dev.lock 2>&1 |
  tee .venv/install.log | awk '/^Collecting/ { printf "\r%d packages", ++n; fflush() } END { print "" }' ||
  { tail -n 20 .venv/install.log >&2; exit 1; }
# Editable without a build: one line that puts the clone on the path, and the command.
site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
pwd > "$site/pilotlight-clone.pth"
cat > .venv/bin/pilotlight <<EOF
#!/bin/sh
exec "$(pwd)/.venv/bin/python" -Pm pilotlight "\$@"
EOF
chmod +x .venv/bin/pilotlight
touch .venv/ready
