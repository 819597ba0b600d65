#!/usr/bin/env bash
# The study of results/gpu: encodings at 12 M parameters on one GPU, as many as SECONDS_LEFT allows, four at a time.
#   bench/gpu-study.sh SECONDS_LEFT OUT [RATE ...]
# Text:   python data/prepare.py packages BOOKS --tokenizer bpe:4096 --out data/gpu       # BOOKS/train and val: *.txt
#         python data/prepare.py BOOKS --tokenizer data/gpu --out data/gpu-books
#         python data/prepare.py packages --tokenizer data/gpu --out data/gpu-packages
#         python data/prepare.py repeats --tokenizer data/gpu --length 512 --out data/gpu-repeats
#         python data/prepare.py repeats --tokenizer data/gpu --out data/gpu-repeats128
#         python data/prepare.py needles --tokenizer data/gpu --length 512 --out data/gpu-needles
# Every encoding gets its first rate before any gets its second. A run whose record is in OUT or in results/gpu/study-60m
# is not repeated, so the same command on another machine goes on. PY names the Python, TOY further overrides of train.py,
# WINDOWS the windows of eval.py and ORDER the encodings.
set -u
end=$(($(date +%s) + $1)) out=$2
shift 2
rates=("${@:-1.2e-2}")
export PY=${PY:-.venv/bin/python} TOY=${TOY:-} WINDOWS=${WINDOWS:-48} OUT_DIR=$out END=$end OMP_NUM_THREADS=2 TORCHINDUCTOR_COMPILE_THREADS=4
mkdir -p "$out" runs/gpu-study

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
ORDER=${ORDER:-forgetting fire t5 kerple-log scale-invariant rnope-swa alibi rope}        # the slowest first

one_run() {     # NAME RATE KEYS...: start, train, evaluate, pack what comes back
    local encoding=$1 rate=$2 name=$1-lr-$2-seed0
    shift 2
    local run=runs/gpu-study/$name start=runs/gpu-study/start-$encoding log=$OUT_DIR/$name.log
    [ -e "$OUT_DIR/$name.tar.gz" ] || [ -d "results/gpu/study-60m/$name" ] && return
    within() { timeout $((END - $(date +%s))) "$PY" "$@" >>"$log" 2>&1; }
    [ $((END - $(date +%s))) -gt 60 ] || { echo "$name: not started, no time left"; return; }
    [ -e "$start/summary.json" ] || within train.py configs/gpu-study.toml run.dir="$start" "$@" train.seq_len=128 \
        train.batch_size=256 train.steps=300 train.warmup=150 train.decay=0.005 train.lr=6e-3 \
        data.mixture='{ "data/gpu-repeats128" = 0.1 }' data.mixture_only=299 $TOY
    within train.py configs/gpu-study.toml run.dir="$run" "$@" train.lr="$rate" train.init_from="$start" $TOY &&
    for text in books packages; do
        within eval.py "$run" --data data/gpu-$text --longest 16384 --protocol fixed --windows $WINDOWS \
            --lengths 256,512,1024,2048,4096,8192,16384 || break
        within eval.py "$run" --data data/gpu-$text --longest 16384 --protocol repeat --windows $WINDOWS \
            --lengths 512,1024,2048,4096,8192,16384 || break
    done
    # needles: the run tuned for 300 steps, then asked at L, 4 L and 16 L
    within train.py configs/needles.toml run.dir="$run-needles" train.init_from="$run" data.dir=data/gpu-needles \
        train.seq_len=512 train.batch_size=32 $TOY &&
        within eval.py "$run-needles" --lengths 512,2048,8192 --protocol needles --windows $WINDOWS
    tar -C runs/gpu-study --exclude=checkpoints --exclude='*.png' -czf "$OUT_DIR/$name.tar.gz" "$name" \
        "start-$encoding/metrics.jsonl" $([ -d "$run-needles/eval" ] && echo "$name-needles/eval") 2>/dev/null
    echo "$name: $(grep -h 'finished' "$log" | tail -1)"
}
export -f one_run
for rate in "${rates[@]}"; do
    for encoding in $ORDER; do echo "$encoding $rate ${KEYS[$encoding]}"; done
done | xargs -P 4 -L 1 bash -c 'one_run "$@"' _
