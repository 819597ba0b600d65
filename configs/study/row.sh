#!/usr/bin/env bash
# One row of the study: `bash configs/study/row.sh CONFIG`, or `make row CONFIG=...` (docs/benchmark.md).
# It chooses the rate, trains the seeds, evaluates them, tunes one on needles, and writes results/rows/NAME. The same
# command resumes. Runs are in runs/study; their weights are not copied.
set -euo pipefail
config=$1
name=$(basename "$config" .toml)
python=${PYTHON:-.venv/bin/python}
rates=${RATES:---grid train.lr=5e-3,8e-3,1.3e-2}
seeds=${SEEDS:-0,1,2,3}
workers=${WORKERS:-2}                    # runs side by side, with one thread each
row=results/rows/$name
work=runs/row/$name
export python OMP_NUM_THREADS=1

# 1. The rate: of full runs with seed 0 the one with the lowest validation loss at L
$python sweep.py "$config" $rates --choose val_loss --seeds 0 --workers "$workers" --runs runs/study --out "$work/rates"

# 2. All seeds at this rate. The run that was chosen is the first of them.
$python sweep.py "$config" --trials "$work/rates/chosen.toml" --seeds "$seeds" --workers "$workers" --runs runs/study \
    --out "$work/report" --eval="--data data/study-docs --protocol fixed --lengths 256 --longest 4096 --windows 120"
runs=$(dirname runs/study/"$name"-lr-*-seed*/eval)      # only these were evaluated

# 3. Both texts: to 16 L, a repeated passage, and to 64 L the first two seeds
evaluate() {
    for text in docs code; do
        data="--data data/study-$text --longest 4096"
        $python eval.py "$1" $data --protocol fixed,trigram --lengths 256,512,1024,4096 --windows 120
        $python eval.py "$1" $data --protocol repeat --lengths 256,1024,4096 --windows 48
        if [[ $1 == *-seed[01] ]]; then
            $python eval.py "$1" --data data/study-$text --protocol fixed --lengths 16384 --windows 24 \
                --json "$1/eval/study-$text-far.json"
        fi
    done
}
export -f evaluate
xargs -P "$workers" -I RUN bash -ec 'evaluate RUN' <<< "$runs"

# 4. Needles: the first seed, tuned at L with two rates
first=$(grep -e '-seed0$' <<< "$runs")
mkdir -p runs/needles
echo 'extends = "../../configs/needles.toml"' > runs/needles/"$name".toml         # runs are named after it
$python sweep.py runs/needles/"$name".toml train.init_from="$first" data.dir=data/study-needles train.batch_size=16 \
    --grid train.lr=1e-3,2e-3 --choose val_loss --seeds 0 --workers "$workers" --runs runs/needles --out "$work/needle-rates"
rate=$(grep -o 'train.lr=[^"]*' "$work/needle-rates/chosen.toml")
tuned=runs/needles/$name-lr-${rate#*=}-seed0
$python eval.py "$tuned" --protocol needle,multi_key --lengths 256,1024,4096 --windows 80

# 5. What a row consists of
mkdir -p "$row"
cp "$work/rates/trials.csv" "$row/"
for data in docs code docs-far code-far; do
    evaluated=()
    for run in $runs; do
        if [ -e "$run/eval/study-$data.json" ]; then evaluated+=("$run"); fi
    done
    $python compare.py "${evaluated[@]}" --data study-$data --out "$work/$data"
done
$python compare.py "$tuned" --out "$work/needles"
for data in docs code docs-far code-far needles; do
    mkdir -p "$row/$data"
    cp "$work/$data"/{table.parquet,training.parquet,runs.json} "$row/$data"
done
[ -e "$row/row.toml" ] || printf 'date = "%s"\nauthor = "%s"\nnote = "%s"\n' \
    "$(date +%F)" "$(git config user.name)" "$(sed -n '1s/^# //p' "$config")" > "$row/row.toml"
