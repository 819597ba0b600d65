#!/usr/bin/env bash
# Encodings x seeds on one GPU, as many as fit: bench/gpu_study.sh [--smoke] [--minutes M] [--out DIR] [key=value ...]
# --smoke: all of it at toy size on a CPU. bench/gpu_study.py says what is done, bench/gpu_env.sh what to carry along.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/bench/gpu_env.sh"
exec "$PY" -m bench.gpu_study" "$@"
