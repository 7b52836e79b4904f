#!/bin/bash
# Every measurement of docs/quality.md that `pliant bench quality` makes, one after the other, into a folder of logs and JSON.
#   bench/quality.sh OUT [pliant]     (default program: build/release/pliant; models: .cache/models, see ./dev model)
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: bench/quality.sh OUT [pliant]}
pliant=${2:-build/release/pliant}
export PLIANT_MODEL_DIR=${PLIANT_MODEL_DIR:-.cache/models}
mkdir -p "$out"
python3 bench/quality_texts.py "$out/texts"
measure() {  # name, options of pliant bench quality
  echo "== $1"
  "$pliant" bench quality "${@:2}" --json "$out/$1.json" | tee "$out/$1.txt"
}
measure texts --texts "$out/texts" --scored 128 --states 12/12,12/8,8/8,8/4,4/4
measure texts-built-in --texts built-in --scored 128 --states 12/12,12/8,8/8,8/4,4/4
problems=tests/data/problems/reckoner.jsonl
measure reckoner-q8_0 tests/data/models/reckoner-q8_0.gguf --reckoner "$problems" --states 16/16,8/8,4/4 --slots 64
[ ! -e "$PLIANT_MODEL_DIR/reckoner-f16.gguf" ] ||
  measure reckoner-f16 "$PLIANT_MODEL_DIR/reckoner-f16.gguf" --reckoner "$problems" --states 16/16 --slots 64
