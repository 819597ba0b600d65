# make train     set up .venv, prepare the corpus if it is missing, train the quick config, evaluate it at
#                longer contexts
# make test      the tests without those marked slow or gpu: about a minute and a half on two cores
# make test-all  every test that this machine can run; the ones marked gpu are skipped where there is no CUDA
# make lint      ruff, mypy, and the contract that imports point one way
# make compare   train and evaluate four encodings at the quick size -> runs/compare/report/report.html;
#                takes four times as long as make train; the same command resumes an interrupted one
# make bench     on the CPU, which must be otherwise idle: a training step of nanorope and of its peers
#                -> results/bench-cpu.md, of each encoding relative to RoPE's -> results/bench-encodings.md,
#                its growth with T and with the number of parameters -> results/growth.md
# make bench-gpu on one CUDA GPU: parity with the CPU in fp64, then the benches -> results/gpu/; in four parts
#                of at most ten minutes each: make gpu-parity, gpu-speed (NANOGPT=FOLDER adds a checkout of
#                nanoGPT), gpu-encodings, gpu-flex
# make gallery   pictures and computed properties of every encoding -> results/gallery, docs/encodings.md
# make soak      break training again and again, half an hour -> docs/reliability.md; needs root to mount
#                small disks
# make lock      pin what pip finds now for the ranges of pyproject.toml -> constraints.txt; needs the network
SHELL := bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
PY := .venv/bin/python
INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal

.PHONY: train test test-all lint compare bench bench-gpu gpu-parity gpu-speed gpu-encodings gpu-flex gallery soak lock
.DELETE_ON_ERROR:

train: .venv/.installed data/stdlib/meta.json
	$(PY) train.py configs/quick.toml
	$(PY) eval.py runs/quick

test: .venv/.installed-test
	$(PYTEST) -m "not slow and not gpu"

test-all: .venv/.installed-test
	$(PYTEST)

lint: .venv/.installed-test
	$(PY) -m ruff check
	$(PY) -m mypy
	$(PY) .ci/layers.py

compare: .venv/.installed data/stdlib/meta.json
	$(PY) sweep.py configs/quick.toml configs/alibi.toml configs/sinusoidal.toml configs/none.toml --runs runs/compare

bench: .venv/.installed-test
	$(PY) -m bench.training --out results/bench-cpu.md
	$(PY) -m bench.each_encoding --out results/bench-encodings.md
	$(PY) -m bench.growth --out results/growth.md

# `make bench-gpu PY=python3` uses a Python that has PyTorch already, with what is missing on PYTHONPATH
GPU := --device cuda --preset gpt2-124m
bench-gpu: gpu-parity gpu-speed gpu-encodings gpu-flex
READY := $(if $(filter file,$(origin PY)),.venv/.installed-test)

gpu-parity: $(READY)
	OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 timeout 580 $(PY) -m pytest -m gpu -n 14 --tb=short 2>&1 | tee results/gpu/parity.txt

gpu-speed: export TORCHINDUCTOR_COMPILE_THREADS = 3
gpu-speed: $(READY)
	timeout 200 $(PY) -m bench.training $(GPU) $(if $(NANOGPT),--nanogpt $(NANOGPT)) --out results/gpu/training.md
	timeout 90 $(PY) -m bench.evaluation $(GPU) --length 65536 --rounds 1 --out results/gpu/evaluation.md
	timeout 200 $(PY) -m bench.growth --device cuda --rounds 1 --seconds 0.5 --sizes 6x384,12x768,24x1024,36x1280,48x1600,32x2560,32x4096 --out results/gpu/growth.md

gpu-encodings: export TORCHINDUCTOR_COMPILE_THREADS = 2
gpu-encodings: $(READY)
	timeout 580 $(PY) -m bench.each_encoding $(GPU) --compile --out results/gpu/encodings.md

gpu-flex: $(READY)
	timeout 580 $(PY) -m bench.attention --device cuda --compile --lengths 1024 --out results/gpu/attention.md

soak: .venv/.installed-test
	$(PY) -m bench.soak

gallery: .venv/.installed
	$(PY) -m docs.gallery

lock:
	rm -rf .lock
	$(PYTHON) -m venv .lock
	.lock/bin/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	{ grep '^#' constraints.txt; .lock/bin/python -m pip freeze --all --exclude pip --exclude-editable | sed 's/+[a-z0-9.]*$$//'; } > .lock/new
	mv .lock/new constraints.txt
	rm -rf .lock

data/stdlib/meta.json: | .venv/.installed
	$(PY) data/prepare.py stdlib

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python 3.11 or newer is needed")'
	$(PYTHON) -m venv .venv

.venv/.installed: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) -e .
	touch $@

.venv/.installed-test: .venv/.installed
	$(INSTALL) -e '.[test]'
	touch $@
