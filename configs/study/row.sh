#!/usr/bin/env bash
# One row of the study: `bash configs/study/row.sh CONFIG`, or `make row CONFIG=...` (docs/benchmark.md).
# It chooses the rate, trains the seeds, evaluates them to 16 L, tunes the first one on needles, writes
# results/rows/NAME, and adds 64 L to it. The same command resumes. Runs are in runs/study; weights are not copied.
set -euo pipefail
config=${1:?give a config: make row CONFIG=configs/rows/mine.toml}
name=$(basename "$config" .toml)
python=${PY:-.venv/bin/python}
rates=${RATES:-}                            # default: 5e-3, 8e-3 and 1.3e-2, and 3e-3 if 5e-3 is the best of them
seeds=${SEEDS:-0,1,2,3}                     # 0, 1 and so on, at least two
workers=${WORKERS:-2}                       # runs side by side, with one thread each
has_far=${FAR:-1}                           # 0: without 64 L
row=results/rows/$name
work=runs/row/$name
export python OMP_NUM_THREADS=1
for data in study study-docs study-code study-repeats study-needles; do
    [ -e "data/$data/meta.json" ] || { echo "error: data/$data is missing; make it with: make study-data" >&2; exit 2; }
done
say() { echo "$(date +%H:%M) $1"; }
on_each() {     # COMMAND: for each line RUN of stdin, several side by side; RUN.log has what it prints
    xargs -P "$workers" -I RUN bash -c "bash -ec '$1' >> RUN.log 2>&1 || { tail -n 1 RUN.log >&2; exit 1; }"
}

# 1. The rate: of full runs with seed 0 the one with the lowest validation loss at L
choose() {      # GRID: of these trials
    $python sweep.py "$config" "$@" --seeds 0 --choose val_loss --workers "$workers" --runs runs/study \
        --out "$work/rates"
}
trial_of() { cut -d '"' -f 4 "$1/chosen.toml"; }                               # what sweep.py chose, and its run
run_of() { grep -F ",$(trial_of "$1")," "$1/trials.csv" | cut -d , -f 3; }
say "1 of 6: one run for each rate; progress is in runs/study/$name-*.log"
if [ -n "$rates" ]; then
    choose $rates
else
    choose --grid train.lr=5e-3,8e-3,1.3e-2
    if [ "$(trial_of "$work/rates")" = train.lr=5e-3 ]; then choose --grid train.lr=3e-3,5e-3,8e-3,1.3e-2; fi
fi
first=runs/study/$(run_of "$work/rates")

# 2. All seeds at this rate. The run that was chosen is the first of them.
stem=${first%-seed0}
say "2 of 6: seeds $seeds; progress is in $stem-seed*.log"
train="$python train.py $config $(trial_of "$work/rates")"
runs=$(for seed in ${seeds//,/ }; do echo "$stem-seed$seed"; done)
on_each "run=RUN; $train train.seed=\${run##*seed} run.dir=RUN" <<< "$runs"

# 3. Both texts: to 16 L, and a repeated passage
evaluate() {
    for text in docs code; do
        done=$1/eval/study-$text.done
        if [ -e "$done" ]; then continue; fi
        near="--data data/study-$text --longest 4096"
        $python eval.py "$1" $near --protocol fixed,trigram --lengths 256,512,1024,4096 --windows 120 --replace
        $python eval.py "$1" $near --protocol repeat --lengths 256,1024,4096 --windows 48
        touch "$done"
    done
}
# the same for 64 L
evaluate_far() {
    for text in docs code; do
        done=$1/eval/study-$text-far.done
        if [ -e "$done" ]; then continue; fi
        $python eval.py "$1" --data data/study-$text --protocol fixed --lengths 16384 --windows 24 \
            --json "$1/eval/study-$text-far.json" --replace
        touch "$done"
    done
}
export -f evaluate evaluate_far
say "3 of 6: evaluation to 16 L; progress is in $stem-seed*.log"
on_each "evaluate RUN" <<< "$runs"

# 4. Needles: the first seed, tuned at L with two rates
say "4 of 6: needles; progress is in runs/needles/$(basename "$stem")-*.log"
tune=runs/needles/$(basename "$stem")
mkdir -p runs/needles
echo 'extends = "../../configs/needles.toml"' > "$tune.toml"           # runs are named after it
$python sweep.py "$tune.toml" train.init_from="$first" data.dir=data/study-needles train.batch_size=16 \
    train.dtype=float32 --grid train.lr=1e-3,2e-3 --seeds 0 --choose val_loss --workers "$workers" \
    --runs runs/needles --out "$work/tuning"
tuned=runs/needles/$(run_of "$work/tuning")
if [ ! -e "$tuned/eval/needles.done" ]; then
    $python eval.py "$tuned" --protocol needle,multi_key --lengths 256,1024,4096 --windows 80 --replace
    touch "$tuned/eval/needles.done"
fi

# 5. What a row consists of
copy_tables() {     # NAME RUN...: what compare.py writes of these runs
    $python compare.py "${@:2}" --data "study-$1" --out "$work/$1" > "$work/$1.log"
    mkdir -p "$row/$1"
    cp "$work/$1"/{table.parquet,training.parquet,runs.json} "$row/$1"
}
say "5 of 6: $row"
copy_tables docs $runs
copy_tables code $runs
copy_tables needles "$tuned"
cp "$work/rates/trials.csv" "$row"
cp "$work/tuning/trials.csv" "$row/needles.csv"
if [ ! -e "$row/row.toml" ]; then
    author=$(git config user.name | tr -d '"\\' || true)
    note=$(sed -n '1s/^# //p' "$config" | tr -d '"\\')
    printf 'date = "%s"\nauthor = "%s"\nnote = "%s"\n' "$(date +%F)" "$author" "$note" > "$row/row.toml"
fi

# 6. To 64 L the first two seeds
if [ "$has_far" = 1 ]; then
    say "6 of 6: 64 L, which a row may lack; progress is in $stem-seed*.log"
    far=$(grep -E -- '-seed[01]$' <<< "$runs")
    on_each "evaluate_far RUN" <<< "$far"
    copy_tables docs-far $far
    copy_tables code-far $far
fi
say "done: edit the note in $row/row.toml, then: make verify ROW=$row"
