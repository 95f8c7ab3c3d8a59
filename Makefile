# The environment is .venv in the repository root; every target makes it first.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := executor,hf,notebooks,test
# The versions of constraints.txt are of Python 3.11 and newer; on 3.10 pip chooses.
export CONSTRAINTS := import sys; print("-c constraints.txt" if sys.version_info >= (3, 11) else "")

.PHONY: help install demo test check notebooks bench clean

help:
	@echo "make install    the environment in $(VENV), every version pinned by constraints.txt"
	@echo "make demo       trace, compare, plan and run GPT-2 124M; writes demo-out/"
	@echo "make test       the whole test suite"
	@echo "make check      ruff format and lint, mypy --strict, import contracts"
	@echo "make notebooks  runs the notebooks in place"
	@echo "make bench      runs benchmarks/*.py"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed, this is " + sys.version.split()[0])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $$($(BIN)/python -c "$$CONSTRAINTS") -e ".[$(EXTRAS)]"
	@touch $@

demo: install
	$(BIN)/python -m pstar_sim demo --out demo-out

# One thread each for torch: two workers with two threads apiece would fight for two cores.
test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

notebooks: install
	$(BIN)/python notebooks/execute.py notebooks/*.ipynb

bench: install
	set -e; for file in benchmarks/[a-z]*.py; do echo "== $$file"; $(BIN)/python "$$file"; done

clean:
	rm -rf dist demo-out .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
