#!/usr/bin/env bash
# Writes go.mod and go.sum for other versions: regenerate.sh OLLAMA MALGO, e.g. regenerate.sh v0.17.4 v0.11.24
set -euo pipefail
cd "$(dirname "$0")"
rm -f go.mod go.sum
go mod init ollama
go mod edit -go=1.26.0 # else the local patch release becomes the least one
go mod edit -require "github.com/ollama/ollama@$1" -tool github.com/ollama/ollama
# malgo contains miniaudio.h, which the archive of Ollama's module lacks
go mod edit -require "github.com/gen2brain/malgo@$2" -tool github.com/gen2brain/malgo
go mod tidy
