#!/usr/bin/env bash
# Parity and speed on one GPU, in less than ten minutes: bench/gpu.sh [--smoke] [--minutes M] [--out FILE.md]
# --smoke: all of it at toy size on a CPU. bench/gpu.py says what is done, bench/gpu_env.sh what to carry along.
set -euo pipefail
args=()
while [ $# -gt 0 ]; do
    case "$1" in
        --out) args+=("$1" "$(realpath -m "${2:?error: $1 needs a file}")"); shift ;;
        *) args+=("$1") ;;
    esac
    shift
done
cd "$(dirname "$0")/.."
. bench/gpu_env.sh
exec "$PY" bench/gpu.py "${args[@]}"
