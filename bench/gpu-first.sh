#!/usr/bin/env bash
# Parity on one GPU, what is new first, then a step of the study's model before and after. OUT is the folder for logs.
set -u
OUT=$1 PY=${PY:-python3}
export OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1
NEW="flex or sink or documents or restart or kerple or learned or fire or t5 or alibi or sandwich or bam or waits"
timeout 150 $PY -m pytest -v -m gpu -n 14 --tb=line -rf -k "$NEW" -p no:cacheprovider >"$OUT/parity-new.txt" 2>&1
grep -a 'FAILED\|passed\|failed' "$OUT/parity-new.txt" | cut -c1-400; grep -ac PASSED "$OUT/parity-new.txt"
timeout 75 $PY -m pytest -v -m gpu -n 14 --tb=line -rf -k "not ($NEW)" -p no:cacheprovider >"$OUT/parity-rest.txt" 2>&1
grep -a 'FAILED\|passed\|failed' "$OUT/parity-rest.txt" | cut -c1-400; grep -ac PASSED "$OUT/parity-rest.txt"
export TORCHINDUCTOR_COMPILE_THREADS=4 OMP_NUM_THREADS=4
STEPS="-m bench.steps rope+compile model.vocab_size=4096 train.optimizer=muon --sizes 6x384 --device cuda --rounds 20"
timeout 70 $PY $STEPS rope+cudagraphs rope --shapes 512,32 512,128 --out "$OUT/busy.md" 2>&1 | tail -n 4
if [ -d .gpu/before ]; then
    (cd .gpu/before && timeout 60 $PY $STEPS rope --shapes 512,32 512,128 --out "$OUT/busy-before.md" 2>&1 | tail -n 4)
fi
