#!/usr/bin/env bash
# Builds the documentation site into build/docs/site. With npm it fetches two scripts (requirements/docs-scripts.tsv), so
# that diagrams are drawn and the search works without a server; without npm, diagrams are shown as text.
set -euo pipefail
cd "$(dirname "$0")/.."
tools=build/docs/tools scripts=build/docs/scripts

if ! cmp -s requirements/docs.lock "$tools/docs.lock"; then
  echo "installing MkDocs into $tools"
  rm -rf "$tools"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps --target "$tools" -r requirements/docs.lock
  cp requirements/docs.lock "$tools/docs.lock"
fi

if ! command -v npm >/dev/null; then
  echo "missing: npm (Debian: apt install npm); diagrams are shown as text, and the search needs a server"
elif ! cmp -s requirements/docs-scripts.tsv "$scripts/fetched.tsv"; then
  rm -rf "$scripts"
  mkdir -p "$scripts"
  while IFS=$'\t' read -r package sha512 member name; do
    echo "fetching $package"
    archive=$(cd "$scripts" && npm pack --silent "$package")
    found=$(openssl dgst -sha512 -binary "$scripts/$archive" | openssl base64 -A)
    [ "$found" = "$sha512" ] || { echo "$package has another digest than requirements/docs-scripts.tsv says" >&2; exit 1; }
    tar -xzOf "$scripts/$archive" "$member" > "$scripts/$name"
    rm "$scripts/$archive"
  done < requirements/docs-scripts.tsv
  cp requirements/docs-scripts.tsv "$scripts/fetched.tsv"
fi

NO_MKDOCS_2_WARNING=1 PYTHONPATH=$tools .venv/bin/python -m mkdocs build --quiet
echo "build/docs/site/index.html"
