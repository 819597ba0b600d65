#!/usr/bin/env bash
# One row of the study: `bash configs/study/row.sh CONFIG`, or `make row CONFIG=...` (docs/benchmark.md).
# It chooses the rate, trains the seeds, evaluates them, tunes the first one on needles, and writes results/rows/NAME.
# The same command resumes. Runs are in runs/study; their weights are not copied.
set -euo pipefail
config=${1:?give a config: make row CONFIG=configs/rows/mine.toml}
name=$(basename "$config" .toml)
python=${PY:-.venv/bin/python}
rates=${RATES:---grid train.lr=5e-3,8e-3,1.3e-2}
seeds=${SEEDS:-0,1,2,3}                     # at least 0 and 1
workers=${WORKERS:-2}                       # runs side by side, with one thread each
row=results/rows/$name
work=runs/row/$name
export python OMP_NUM_THREADS=1
for data in study study-docs study-code study-repeats study-needles; do
    [ -e "data/$data/meta.json" ] || { echo "error: data/$data is missing; make it with: make study-data" >&2; exit 2; }
done

# 1. The rate: of full runs with seed 0 the one with the lowest validation loss at L
$python sweep.py "$config" $rates --seeds 0 --choose val_loss --workers "$workers" --runs runs/study --out "$work/rates"
trial_of() { cut -d '"' -f 4 "$1/chosen.toml"; }                               # what sweep.py chose, and its run
run_of() { grep -F ",$(trial_of "$1")," "$1/trials.csv" | cut -d , -f 3; }
first=runs/study/$(run_of "$work/rates")

# 2. All seeds at this rate. The run that was chosen is the first of them.
stem=${first%-seed0}
train="$python train.py $config $(trial_of "$work/rates")"
tr , '\n' <<< "$seeds" | xargs -P "$workers" -I SEED bash -c \
    "$train train.seed=SEED run.dir=$stem-seedSEED >> $stem-seedSEED.log 2>&1"
runs=$(for seed in ${seeds//,/ }; do echo "$stem-seed$seed"; done)

# 3. Both texts: to 16 L, a repeated passage, and to 64 L the first two seeds
evaluate() {
    for text in docs code; do
        done=$1/eval/study-$text.done
        if [ -e "$done" ]; then continue; fi
        near="--data data/study-$text --longest 4096"
        $python eval.py "$1" $near --protocol fixed,trigram --lengths 256,512,1024,4096 --windows 120 --replace
        $python eval.py "$1" $near --protocol repeat --lengths 256,1024,4096 --windows 48
        if [[ $1 == *-seed[01] ]]; then
            $python eval.py "$1" --data data/study-$text --protocol fixed --lengths 16384 --windows 24 \
                --json "$1/eval/study-$text-far.json" --replace
        fi
        touch "$done"
    done
}
export -f evaluate
xargs -P "$workers" -I RUN bash -ec 'evaluate RUN' <<< "$runs"

# 4. Needles: the first seed, tuned at L with two rates
tune=runs/needles/$(basename "$stem")
mkdir -p runs/needles
echo 'extends = "../../configs/needles.toml"' > "$tune.toml"           # runs are named after it
$python sweep.py "$tune.toml" train.init_from="$first" data.dir=data/study-needles train.batch_size=16 \
    --grid train.lr=1e-3,2e-3 --seeds 0 --choose val_loss --workers "$workers" --runs runs/needles --out "$work/tuning"
tuned=runs/needles/$(run_of "$work/tuning")
$python eval.py "$tuned" --protocol needle,multi_key --lengths 256,1024,4096 --windows 80 --replace

# 5. What a row consists of
for data in docs code docs-far code-far; do
    evaluated=()
    for run in $runs; do
        if [ -e "$run/eval/study-$data.json" ]; then evaluated+=("$run"); fi
    done
    $python compare.py "${evaluated[@]}" --data "study-$data" --out "$work/$data"
done
$python compare.py "$tuned" --out "$work/needles"
for data in docs code docs-far code-far needles; do
    mkdir -p "$row/$data"
    cp "$work/$data"/{table.parquet,training.parquet,runs.json} "$row/$data"
done
cp "$work/rates/trials.csv" "$row"
cp "$work/tuning/trials.csv" "$row/needles.csv"
if [ ! -e "$row/row.toml" ]; then
    author=$(git config user.name | tr -d '"\\' || true)
    note=$(sed -n '1s/^# //p' "$config" | tr -d '"\\')
    printf 'date = "%s"\nauthor = "%s"\nnote = "%s"\n' "$(date +%F)" "$author" "$note" > "$row/row.toml"
fi
