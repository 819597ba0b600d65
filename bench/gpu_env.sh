# Sourced by gpu.sh and gpu_study.sh with $root: PY, a Python that has what we need. Nothing is fetched: what is
# missing comes from wheels/, a folder that git ignores, into .wheels-site/. Fill it where there is a network:
#   python -m pip download -d wheels --only-binary=:all: --python-version 3.12 --implementation cp \
#       --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -c constraints.txt pydantic
# with the Python version of the machine with the GPU. 3 MB; the rest stands beside torch there.
PY=${PYTHON:-}
if [ -z "$PY" ]; then
    PY=python3
    if [ -x "$root/.venv/bin/python" ]; then PY=$root/.venv/bin/python; fi
fi
export PYTHONPATH="$root/.wheels-site${PYTHONPATH:+:$PYTHONPATH}"
needed=$("$PY" -c 'import importlib.util as u
print(*[n for n in ("torch", "numpy", "pydantic", "safetensors", "tqdm", "matplotlib") if not u.find_spec(n)])') \
    || { echo "error: PYTHON=$PY: cannot be run; give PYTHON=python3 or another" >&2; exit 2; }
if [ -n "$needed" ] && [ -d "$root/wheels" ]; then
    # shellcheck disable=SC2086
    "$PY" -m pip install --quiet --no-index --find-links "$root/wheels" --target "$root/.wheels-site" --upgrade \
        $needed 2> /dev/null \
        || { echo "error: wheels/: lacks $needed, or what these need; see bench/gpu_env.sh" >&2; exit 2; }
elif [ -n "$needed" ]; then
    echo "error: $PY lacks $needed, and there is no folder wheels/; bench/gpu_env.sh says how to fill it" >&2
    exit 2
fi
# several processes compile at a time, each with so many of its own
export TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS:-4}
