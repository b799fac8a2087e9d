#!/usr/bin/env bash
# Writes go.mod and go.sum for another version: regenerate.sh KARPENTER, e.g. regenerate.sh v1.14.1
set -euo pipefail
cd "$(dirname "$0")"
rm -f go.mod go.sum
go mod init karpenter
go mod edit -go=1.26.0 # else the local patch release becomes the least one
go mod edit -require "sigs.k8s.io/karpenter@$1" -tool sigs.k8s.io/karpenter/kwok
go mod tidy
