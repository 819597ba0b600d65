#!/usr/bin/env bash
# Encodings x seeds on one GPU, as many as fit: bench/gpu_study.sh [--smoke] [--minutes M] [--out DIR] [key=value ...]
# --smoke: all of it at toy size on a CPU. bench/gpu_study.py says what is done, bench/gpu_env.sh what to carry along.
set -euo pipefail
args=()
while [ $# -gt 0 ]; do
    case "$1" in
        --out | --runs) args+=("$1" "$(realpath -m "${2:?error: $1 needs a folder}")"); shift ;;
        *) args+=("$1") ;;
    esac
    shift
done
cd "$(dirname "$0")/.."
. bench/gpu_env.sh
exec "$PY" bench/gpu_study.py "${args[@]}"
