#!/usr/bin/env bash
# The study of results/gpu: eight encodings at 12 M parameters on one GPU, at two rates, then more seeds while time lasts.
#   bench/gpu-study.sh SECONDS_LEFT OUT
# Text:   S=sdists:configs/study/sdists.csv
#         python data/prepare.py $S --tokenizer bpe:4096 --out data/gpu
#         for kind in docs code; do python data/prepare.py $S:$kind --tokenizer data/gpu --out data/gpu-$kind; done
#         python data/prepare.py repeats --tokenizer data/gpu --length 512 --out data/gpu-repeats
#         python data/prepare.py needles --tokenizer data/gpu --length 512 --out data/gpu-needles
# Seed 0 is trained at each rate; the one with the lower validation loss at L is evaluated. Other seeds have its rate.
# The same command goes on where the last one ended. PY names the Python, TOY further overrides of train.py, WINDOWS the
# windows of eval.py, ORDER the encodings, SEEDS and RATES what their names say, AT_ONCE the runs at a time.
set -u
export END=$(($(date +%s) + $1)) OUT_DIR=$2
export PY=${PY:-.venv/bin/python} TOY=${TOY:-} WINDOWS=${WINDOWS:-48} RATES=${RATES:-6e-3 1.2e-2}
export OMP_NUM_THREADS=2 TORCHINDUCTOR_COMPILE_THREADS=3
mkdir -p "$OUT_DIR" runs/gpu-study

declare -A KEYS=(
    [rope]="position.encoding=rope"
    [alibi]="position.encoding=alibi"
    [kerple-log]="position.encoding=kerple_log"
    [t5]="position.encoding=t5"
    [fire]="position.encoding=fire"
    [forgetting]="position.encoding=forgetting"
    [scale-invariant]="position.encoding=p_rope position.p=0.5 position.scale_invariant=10.0"
    [rnope-swa]="position.encoding=rope position.skip_every=3 model.window=128 model.full_every=3"
)
ORDER=${ORDER:-fire t5 forgetting kerple-log rope alibi scale-invariant rnope-swa}        # the slowest first

val_loss() { grep -o '"val_loss": [0-9.]*' "$1/summary.json" | grep -o '[0-9.]*$'; }

one_seed() {    # SEED ENCODING KEYS...: choose the rate if it is seed 0, train, evaluate, tune on needles
    local seed=$1 encoding=$2 log=$OUT_DIR/$2-seed$1.log chosen=runs/gpu-study/$2.rate
    shift 2
    within() {
        local left=$((END - $(date +%s)))
        [ $left -gt 15 ] && timeout $left "$PY" "$@" >>"$log" 2>&1
    }
    local rates=$RATES
    [ "$seed" = 0 ] || rates=$(cat "$chosen") || return
    for rate in $rates; do
        local run=runs/gpu-study/$encoding-lr-$rate-seed$seed
        [ -e "$run/summary.json" ] ||
            within train.py configs/gpu-study.toml run.dir="$run" "$@" train.lr="$rate" train.seed="$seed" $TOY || return
        echo "$(date +%T) $run: validation loss $(val_loss "$run")"
    done
    if [ "$seed" = 0 ]; then
        for rate in $rates; do echo "$(val_loss "runs/gpu-study/$encoding-lr-$rate-seed0") $rate"; done |
            sort -n | head -n 1 | cut -d ' ' -f 2 > "$chosen"
    fi
    run=runs/gpu-study/$encoding-lr-$(cat "$chosen")-seed$seed
    for text in docs code; do
        within eval.py "$run" --data data/gpu-$text --protocol fixed,repeat --targets 128 --windows "$WINDOWS" \
            --lengths 256,512,1024,2048,4096,8192,16384 || return
    done
    echo "$(date +%T) $run: evaluated"
    within train.py configs/needles.toml run.dir="$run-needles" train.init_from="$run" data.dir=data/gpu-needles \
        train.seq_len=512 train.batch_size=32 $TOY &&
        within eval.py "$run-needles" --lengths 512,2048,8192 --protocol needle,multi_key --windows 80 &&
        echo "$(date +%T) $run: needles"
}
export -f one_seed val_loss
for seed in ${SEEDS:-0 1 2}; do
    for encoding in $ORDER; do echo "$seed $encoding ${KEYS[$encoding]}"; done |
        xargs -P "${AT_ONCE:-6}" -L 1 bash -c 'one_seed "$@"' _
done
tar -C runs/gpu-study --exclude=checkpoints --exclude='*.png' -czf "$OUT_DIR/records.tar.gz" .
