#!/usr/bin/env bash
# Writes go.mod and go.sum for other versions: regenerate.sh KUBERNETES ETCD KWOK, e.g. regenerate.sh 1.36.3 v3.6.8 v0.8.0
set -euo pipefail
cd "$(dirname "$0")"
kubernetes=$1 etcd=$2 kwok=$3
rm -f go.mod go.sum
go mod init testplane
go mod edit -go=1.26.0 # else the local patch release becomes the least one
# k8s.io/kubernetes asks for its sister modules as v0.0.0, for they live in its own tree: each needs a replacement.
sums=$(go mod download -json "k8s.io/kubernetes@v$kubernetes" | sed -n 's/.*"GoMod": "\(.*\)",/\1/p')
for module in $(sed -n 's#^[[:space:]]*\(k8s.io/[a-z-]*\) => ./staging/src/.*#\1#p' "$sums"); do
  go mod edit -replace "$module=$module@v0.${kubernetes#1.}"
done
# kwok is a tool: same versions, same compile cache
go mod edit -require "k8s.io/kubernetes@v$kubernetes" -require "go.etcd.io/etcd/server/v3@$etcd" \
  -require "sigs.k8s.io/kwok@$kwok" -tool sigs.k8s.io/kwok/cmd/kwok
go mod tidy
