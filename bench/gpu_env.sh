# Sourced by gpu.sh and gpu_study.sh: PY, a Python that has what we need. Nothing is fetched: what is missing comes
# from wheels/, a folder that git ignores, into .wheels-site/, with PYTHONPATH. Fill it where there is a network:
#   python -m pip download -d wheels --only-binary=:all: --python-version 3.12 --implementation cp \
#       --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -c constraints.txt pydantic
# with the Python version of the machine with the GPU. 3 MB; the rest stands beside torch there.
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    if [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; fi
fi
PY=$PYTHON
missing() {
    "$PY" -c 'import importlib.util as u
print(*[n for n in ("torch", "numpy", "pydantic", "safetensors", "tqdm", "matplotlib") if not u.find_spec(n)])'
}
export PYTHONPATH="$PWD/.wheels-site${PYTHONPATH:+:$PYTHONPATH}"
needed=$(missing) || { echo "error: PYTHON=$PYTHON: cannot be run; give PYTHON=python3 or another" >&2; exit 2; }
if [ -n "$needed" ] && [ -d wheels ]; then
    # shellcheck disable=SC2086
    "$PY" -m pip install --quiet --no-index --find-links wheels --target .wheels-site --upgrade $needed \
        || { echo "error: wheels/: lacks $needed, or what these need; see bench/gpu_env.sh" >&2; exit 2; }
elif [ -n "$needed" ]; then
    echo "error: $PYTHON lacks $needed, and there is no folder wheels/; bench/gpu_env.sh says how to fill it" >&2
    exit 2
fi
# several processes compile at a time, each with so many of its own
export TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS:-4}
