#!/usr/bin/env bash
# Parity and speed on one GPU, in less than ten minutes: bench/gpu.sh [--smoke] [--minutes M] [--out FILE.md]
# --smoke: all of it at toy size on a CPU. bench/gpu.py says what is done, bench/gpu_env.sh what to carry along.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/bench/gpu_env.sh"
exec "$PY" -m bench.gpu" "$@"
