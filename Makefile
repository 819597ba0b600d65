# make train   set up .venv, prepare the corpus if missing, train the quick config, evaluate it at longer contexts
# make test    set up .venv with the test packages, run the tests, two at a time
# make lint    ruff and mypy
# make compare train and evaluate four encodings at the quick size, four times make train (an
#              interrupted one goes on) -> runs/compare/report/report.html
# make bench   a training step against the peers' -> results/bench-cpu.md, one of every encoding over
#              RoPE's -> results/bench-encodings.md, its growth with T and parameters -> results/growth.md;
#              on an otherwise idle machine
# make soak    break training again and again, up to an hour -> docs/reliability.md; needs root for its disks
# make gallery pictures and computed properties of every encoding -> results/gallery, docs/encodings.md
PYTHON ?= python3
PY := .venv/bin/python
INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: train test lint compare bench soak gallery
.DELETE_ON_ERROR:

train: .venv/.installed data/stdlib/meta.json
	$(PY) train.py configs/quick.toml
	$(PY) eval.py runs/quick

test: .venv/.installed-test
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal

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

soak: .venv/.installed-test
	$(PY) -m bench.soak

gallery: .venv/.installed
	$(PY) -m docs.gallery

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
